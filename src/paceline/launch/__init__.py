"""Placing Ray on the hosts of an allocation: launcher, its server and the supervisor on each host."""
