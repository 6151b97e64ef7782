"""Entry point `vllm.general_plugins`: makes `--kv-transfer-config` know KVKeepConnector.

vLLM calls it in every process, perhaps more than once.
"""

NAME = "KVKeepConnector"
_MODULE = "kvkeep.connectors.vllm.connector"


def register() -> None:
    """Register the connector; a second call changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, _MODULE, NAME)
