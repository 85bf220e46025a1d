"""``gsd-kernels serve``: an OpenAI-compatible server on this machine."""

from __future__ import annotations

from typing import Annotated

from gsd_kernels_cli import options
from gsd_kernels_cli.options import option, read_graph_config
from gsd_kernels_cli.output import err, progress
from gsd_kernels_cli.values import check_draft

from .limits import Limits, bind, check_installed, hosts_of, is_loopback, origins_of

_SERVER = "Server"


def command(
    *,
    named: options.Named,
    models: options.Models,
    graph_config: options.GraphOption = None,
    criterion: options.CriterionOption = "exact",
    backend: options.Backend = "auto",
    host: Annotated[str, option(_SERVER, "Address to listen on; 0.0.0.0 is every network's.")] = "127.0.0.1",
    port: Annotated[int, option(_SERVER, "0 takes a free one.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, option(_SERVER, "By which clients ask for the model; default: MODEL.")] = None,
    cors: Annotated[
        list[str] | None,
        option(
            _SERVER,
            "A web page's origin whose scripts may ask, as http://localhost:3000; * is any. May be repeated.",
            metavar="ORIGIN",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        option(
            _SERVER,
            "A name of this machine that requests may ask for, beside localhost; * is any. May be repeated.",
            metavar="NAME",
        ),
    ] = None,
    limits: Limits,
) -> None:
    """Serve a model to OpenAI clients; one request is decoded at a time.

    POST /v1/chat/completions, /v1/completions, /v1/responses; GET /v1/models, /v1/models/ID, /health. Every response
    has the statistics of its decoding in the field gsd_kernels, a stream in its last event. Ctrl-C ends it.
    """
    model = named.name
    check_draft(model, models.assistant_model)
    hosts, origins = hosts_of(host, allowed_host), origins_of(cors)
    with bind(host, port) as where:
        with progress("loading the models"):
            check_installed()
            config = read_graph_config(graph_config)
            from gsd_kernels_hf import patch

            pair = models.load(model)
            drafting = {"tokenizer": pair.tokenizer, **pair.speculation, "graph_config": pair.shape(config)}
            handle = patch(pair.target, criterion=criterion, backend=backend, **drafting)
        from . import server

        name = name or model or "demo"
        app = server.make_app(name, handle, pair.tokenizer, origins=origins, hosts=hosts, limits=limits)
        if not is_loopback(host):
            err.print(f"gsd-kernels: anyone who reaches {host} can use this server: it asks for no key")
        url = f"http://{f'[{host}]' if ':' in host else host}:{where.getsockname()[1]}/v1"
        err.print(f"gsd-kernels: serving {name} at {url}; Ctrl-C ends it")
        server.run(app, where)
