"""Why episodes end: causes of failure by counterfactual replay, their counts in arms, and what is
written about them."""
