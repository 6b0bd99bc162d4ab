"""Programs for the type checker; pytest does not collect them."""
