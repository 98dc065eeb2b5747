"""All that is served."""

from scheduler.http import completions, health, models
from scheduler.http.front import Route

ROUTES: list[Route] = [*completions.ROUTES, *models.ROUTES, *health.ROUTES]
