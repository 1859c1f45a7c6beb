"""Published claims on maze agents, row by row, with their numbers, and how they are measured here.

Sources: "Understanding and controlling a maze-solving policy network" (2023, arXiv
2310.08043), "Add a top-right vector" (2023), "Behavioural statistics for a maze-solving agent"
(2023).
"""

from stats.claims import Claim, ClaimsTable

CLAIMS = ClaimsTable({
    1: Claim("a trained agent reaches the cheese in nearly every episode of its region (a curve)",
             "success on unseen levels, Wilson's interval"),
    2: Claim("cheese anywhere: reached in 69.1 % of 2 000 levels; in 71.4 % of 5 239 forks with "
             "the cheese outside 5 x 5; R = 7: 84.8 % of 1 000",
             "forks, cheese outside the region: episodes played to their end, and exact "
             "probabilities"),
    3: Claim("R = 1 never leaves its way for the cheese, R = 2 rarely, all others do (15 agents)",
             "row 2 for each R"),
    4: Claim("one feature predicts it: accuracy of C–5x5 .775, C–T .773, C–D .761 (Euclidean), C–D "
             ".754, C–5x5 .735, C–T .732 (steps); base rate .714 (5 239 forks)",
             "logistic regression on each of 16 features, 10-fold over levels; the best three, "
             "with the base rate's score"),
    5: Claim("together: C–T −1.405 and C–D −.516 (Euclidean), C–D −.577 (steps), intercept "
             "1.355, accuracy .824 (10 000 runs)",
             "L1 logistic regression on standardised features; bootstrap intervals"),
    6: Claim("less the level's own cheese vector: median P(cheese) .81 to .03, P(corner) rises, "
             "P(other) is unchanged (52 forks)",
             "probabilities at the decision square, c = −1; controls: vectors with permuted cells, "
             "Gaussian vectors of the same norm"),
    7: Claim("plus it: nothing much", "the same, c = +1; the primary number is the log-odds",
             is_null=True),
    8: Claim("a random vector ruins the field (pictures)",
             "whole fields; 20 Gaussian vectors with the norm of the cheese vector, with the range "
             "of the 20 means", tested=False),
    9: Claim("another level's vector acts if its cheese is at the same square, often at 2 squares "
             "or fewer off, else not; the mean of 100 levels does nothing (pictures)",
             "row 6 with vectors of other levels"),
    10: Claim("patched with cheese is nearly the field without cheese, often (pictures)",
              "mean total variation from the field of the level without cheese, before and after"),
    11: Claim("it works for every agent, with all layers at once and c = −0.05, too; the last "
              "layers differ", "row 6 at every layer, and at all at once"),
    12: Claim("the vector to the corner draws the mouse there: a little at 0.5, strongly at 1 and "
              "5, less at 10, garbage at 20; less in small mazes (pictures)",
              "P(corner) at the decision square by coefficient"),
    13: Claim("both vectors act together (pictures)",
              "cheese −1, corner +1, both; the interaction is the departure of the log-odds from "
              "the sum", tested=False),
    14: Claim("11 of 128 channels follow the cheese; one is +0.6 at the cheese and −0.2 elsewhere "
              "(by eye)", "channels chosen on 100 levels that follow it on 100 others; mean at the "
              "cheese, after the mean elsewhere"),
    15: Claim("that channel times more than 1: slightly more cheese; 0: slightly less; below −1: "
              "avoids it (pictures)",
              "P(cheese) at the decision square; controls: random channels"),
    16: Claim("one cell set to 5.5 draws the mouse there: success about .9 on the way to the "
              "corner, below .3 at 25 squares off it, .2 at 50; moving the cheese works best",
              "path probability of every free square, cheese removed, by distance from that way; "
              "controls: other channels, other cells"),
    17: Claim("resampling the channels from a level with the same cheese square changes .88, from "
              "another 1.26; random channels .60 and .54 (published norm, %, 30 seeds)",
              "mean total variation; double contrast"),
    18: Claim("probes find squares, cheese and mouse well; whether it will get the cheese with .78 "
              "to .85 at a base rate of .68 (1 000 forks)",
              "best layer of each probe on held-out levels; base: without features"),
}, "python -m maze.table", (
    "Brackets hold 95 % intervals: Wilson's for shares, otherwise a bootstrap over levels. The "
    "number of an effect is the change that the patch causes. A claim holds if its tested number "
    "does: the interval excludes 0, and p (paired sign flips, Holm's correction over the agent's "
    "column) and the share of matched controls with as large an effect are at most 0.05.",
    "Agents that share a teacher share part of what it knows; their model cards say how much.",
    "Row 17: the published numbers are a norm that shrinks with the size of a maze; findings.csv "
    "has it, too."))
