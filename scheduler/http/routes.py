"""All that is served."""

from scheduler.http import completions, health, models, observing, tokenizing
from scheduler.http.front import Route

ROUTES: list[Route] = [
    *completions.ROUTES,
    *models.ROUTES,
    *tokenizing.ROUTES,
    *health.ROUTES,
    *observing.ROUTES,
]
