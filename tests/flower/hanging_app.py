"""A ClientApp whose nodes hang when they get messages of the types that ``data-hangs`` in their node config names."""

import time

from flwr.clientapp import ClientApp

from fedalign.flower import client_app


class HangingApp(ClientApp):
    """Answers as FedALIGN's app does, or never."""

    def __call__(self, message, context):
        while message.metadata.message_type in str(context.node_config.get("data-hangs", "")).split():
            time.sleep(1.0)
        return client_app.app(message, context)


app = HangingApp()
