"""How Hypothesis runs the properties of inherited suites."""

from hypothesis import HealthCheck, settings

law = settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors])
"""Above ``@given``: several classes may inherit the property, and its first example may compile."""

trace_law = settings(law, max_examples=max(1, settings().max_examples // 4))
"""As `law`, where one example is a whole trace."""
