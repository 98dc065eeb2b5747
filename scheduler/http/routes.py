"""All that is served."""

from scheduler.http import completions, health, models, observing
from scheduler.http.front import Route

ROUTES: list[Route] = [*completions.ROUTES, *models.ROUTES, *health.ROUTES, *observing.ROUTES]
