"""A run's rows on a rank: from the cache that the launcher filled, by the same key."""

from shardwise.data import Prepared, prepare
from shardwise.recipe.schema import Data
from shardwise.training.model import ModelFolder


def prepared_rows(folder: ModelFolder, section: Data) -> Prepared:
    """`section` tokenized for this model as training does it. Raises what `data.prepare` raises."""
    recipe, config = folder.recipe, folder.config().get_text_config()
    return prepare(
        section,
        folder.path,
        revision=recipe.model.revision,
        chat_template=recipe.model.chat_template,
        max_length=getattr(config, "max_position_embeddings", None),
        vocabulary=config.vocab_size,
        seed=recipe.training.seed,
    )
