"""All that is served."""

from scheduler.http import completions, health, models, observing, openapi, tokenizing
from scheduler.http.front import Route

_DESCRIBED: list[Route] = [
    *completions.ROUTES,
    *models.ROUTES,
    *tokenizing.ROUTES,
    *health.ROUTES,
    *observing.ROUTES,
]

ROUTES = [*_DESCRIBED, openapi.described(_DESCRIBED)]
