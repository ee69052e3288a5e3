"""An engine without weights, with tokens by formula and times by a model of the machine."""
