"""Findings of the article, row by row, with its numbers, and how each is measured here.

Source: Hilton, Cammarata, Carter, Goh and Olah (2020), "Understanding RL Vision", Distill,
doi 10.23915/distill.00029, of one agent for CoinRun and 14 more.
"""

from __future__ import annotations

from stats.claims import Claim, ClaimsTable

CLAIMS = ClaimsTable({
    1: Claim("value attribution lies on objects: coins raise the value, enemies and saws lower it",
             "share of |attribution| in the cells that an object touches, by their share of the "
             "grid; mean sign"),
    2: Claim("sparse: 10 pairs of cell and feature hold more than 80 % in one chosen frame",
             "the same share in all frames: median (quartiles)"),
    3: Claim("directions of features are near one-hot, and more salient than those of activations",
             "largest entry of a direction by its sum; object score of the features"),
    4: Claim("the output of a layer that is all zero is of the order of the mean value (8.9 and "
             "9.56 of 10)", "mean of G(0) beside that of V"),
    5: Claim("fails about 1 of 200 levels, for reasons that one can see",
             "rate of failure by cause, by counterfactual replay; Wilson's interval"),
    6: Claim("hallucinations: the value jumps by .03 and .09 for one step",
             "|V(t) - (V(t-1) + V(t+1)) / 2|, in deviations of V; frames in which a feature is "
             "in its top 1 % in a cell away from its object"),
    7: Claim("edits are targeted (10 000 levels; failures by saw, enemy moving left, right, other "
             "in %): .37, .16, .12, .08; blind to saws 12.76, .16, .08, .05; blind to enemies "
             "moving left .36, 4.69, .97, .07",
             "failures by a cause, edited beside original on the same levels; exact McNemar test, "
             "Holm over edits and causes; random directions as controls"),
    8: Claim("not blind entirely: with saws invisible 32.20 % fail by them (blindness .39)",
             "(edited - original) by (invisible - original)"),
    9: Claim("interpretable features appear with many levels of training (Spearman .91 over 14 "
             "models)", "object score by number of levels"),
    10: Claim("trained on 100 levels the value is a clock, and features look at the background",
              "share of V's variance that the steps left in the level explain; share of the "
              "residual"),
    11: Claim("the third of five convolutions is the most interpretable",
              "object score of each layer"),
    12: Claim("odd frames have a large residual", "rank correlation of its share with |advantage|"),
}, "python -m attribution.table", (
    "Brackets: 95 % intervals; rates Wilson's, others by bootstrap over episodes or levels, where "
    "the row does not say otherwise. A change is given as the number without and with the edit. "
    "Holds: by the interval; in row R7 what is claimed, by interval, p after Holm and controls.",),
    letter="R")
