"""All that is served."""

from scheduler.http import chat, completions, flushing, health, models, observing, openapi, tokenizing
from scheduler.http.front import Route

_DESCRIBED: list[Route] = [
    *chat.ROUTES,
    *completions.ROUTES,
    *models.ROUTES,
    *tokenizing.ROUTES,
    *flushing.ROUTES,
    *health.ROUTES,
    *observing.ROUTES,
]

ROUTES = [*_DESCRIBED, openapi.described(_DESCRIBED)]
