"""GLM-4-0414 and later, dense: GLM-4 with norms after attention and MLP as well."""

from infinigen_jax.models import glm
from infinigen_jax.models.base import POST_NORMS, PRE_NORMS

DEFAULTS = glm.DEFAULTS
SETTINGS = glm.SETTINGS | {"norms": PRE_NORMS + POST_NORMS}
