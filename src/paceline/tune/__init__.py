"""`paceline tune`: a hyperparameter search. Each trial is an ordinary run; Ray Tune schedules them."""
