"""Explain one failure of an agent on one page, see ``ExplainOptions``."""

from analysis.explained_failure import ExplainOptions, explain
from common.options import command

main = command(ExplainOptions, explain)

if __name__ == "__main__":
    raise SystemExit(main())
