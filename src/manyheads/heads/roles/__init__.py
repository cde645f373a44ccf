"""Roles: what each head does, each claim with its score, its baseline and the number of cases."""

from manyheads.heads.roles.find import roles as roles
from manyheads.heads.roles.judge import judge as judge
