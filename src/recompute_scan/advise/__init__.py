"""Advice: the checkpoint to keep, in sentences and as a diff."""

from recompute_scan.advise.choice import RunFacts as RunFacts
from recompute_scan.advise.choice import Switch as Switch
from recompute_scan.advise.choice import advise_removal as advise_removal
from recompute_scan.advise.choice import keep_and_drop as keep_and_drop
from recompute_scan.advise.choice import mechanism_of as mechanism_of
from recompute_scan.advise.choice import place as place
from recompute_scan.advise.choice import switch_of as switch_of
from recompute_scan.advise.choice import take_out as take_out
from recompute_scan.advise.choice import title_of as title_of
from recompute_scan.advise.settings import advise_fewer as advise_fewer
from recompute_scan.advise.settings import advise_selective as advise_selective
from recompute_scan.frameworks.registry import find_mechanism as find_mechanism
