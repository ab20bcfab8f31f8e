"""Hands the metrics of a run to one experiment tracker. `python3 -m prl_tracker KIND SETTINGS.json`, started and watched by `prl`."""
