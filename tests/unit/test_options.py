"""URLs and options: what is meant is understood, what is not is named (K8)."""

from __future__ import annotations

import ssl

import pytest
import redis
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.transport.redis import SentinelChannel

from celery_toc import timeout_center
from kombu_toc import (
    AsyncTimeoutCenter,
    ConfigurationError,
    Limits,
    SlotCountError,
    TimeoutCenter,
    center_for,
)
from kombu_toc.client.connect import connect, tls_arguments
from kombu_toc.client.options import Settings, mask_password, read, read_url, sentinel_url

from ..support.cases import each

SECRET = "sesame"


def settings(url_query=None, **options) -> Settings:
    return read(url_query or {}, options)


# -- options


def test_without_options_everything_has_its_default():
    made = settings()
    assert made == Settings()
    assert (made.visibility_timeout, made.prefix, made.toc_slots) == (60.0, "toc:", None)


def test_a_url_may_say_what_the_transport_options_may():
    query = {
        "visibility_timeout": "30",
        "global_keyprefix": "app:",
        "priority_steps": "0,5",
        "toc_slots": "16",
        "toc_retries": "3",
        "toc_deflate": "no",
        "toc_poll_interval": "0.5",
        "toc_retry_backoff": "2",
        "toc_retry_backoff_max": "60",
        "toc_dead_age": "3600",
        "toc_dead_limit": "50",
        "toc_wait_replicas": "1",
        "toc_wait_timeout": "0.5",
    }
    made = settings(query)
    assert made.visibility_timeout == 30
    assert made.prefix == "app:toc:"
    assert made.priority_steps == (0, 5)
    assert (made.toc_slots, made.toc_retries) == (16, 3)
    assert made.toc_deflate is False
    assert made.toc_poll_interval == 0.5
    assert made.limits == Limits(30.0, 2.0, 60.0, 3600.0, 50)
    assert (made.toc_wait_replicas, made.toc_wait_timeout) == (1, 0.5)
    assert settings({"toc_slots": "4"}, toc_slots=16).toc_slots == 4, "the URL goes before them"


def test_limits_per_topic_are_checked_and_the_topic_named():
    """W2"""
    assert settings(toc_topics={"mail": {"slots": 16}}).toc_topics == {"mail": {"slots": 16}}
    with pytest.raises(SlotCountError, match="'mail'"):
        settings(toc_topics={"mail": {"slots": 5}})
    for name in ("slot", "topic", "cls"):
        with pytest.raises(ConfigurationError, match=f"'mail'.*'{name}'"):
            settings(toc_topics={"mail": {name: 4}})


@each(
    ("name", "value", "what"),
    [
        # The nearest that is known is named, if one resembles what was said.
        ("visibility_timout", "1", "'visibility_timout' in the URL.*'visibility_timeout'"),
        ("toc_slot", "1", "'toc_slot' in the URL.*'toc_slots'"),
        ("prioritysteps", "1", "'prioritysteps' in the URL.*'priority_steps'"),
        ("socket_timout", "1", "'socket_timout' in the URL.*'socket_timeout'"),
        *((name, "1", f"{name!r} in the URL$") for name in ("toc_zzz", "sep_", "qqqq")),
        ("sep", ":", r"'sep' in the URL is an option of Kombu's redis"),
        ("toc_topics", "mail", r"toc_topics.*broker_transport_options"),
        *(
            ("toc_slots", value, f"^toc_slots must be a power of two from 1 to 512, not {value}$")
            for value in ("7", "0", "-8", "1024")
        ),
        ("socket_timeout", "long", "socket_timeout.*'long'"),
        ("max_connections", "many", "max_connections.*'many'"),
        ("health_check_interval", "x", "health_check_interval.*'x'"),
        ("ssl_cert_reqs", "never", "ssl_cert_reqs must be required, optional or"),
    ],
)
def test_an_option_in_the_url_that_makes_no_sense_is_refused_and_named(name, value, what):
    with pytest.raises(SlotCountError if name == "toc_slots" else ConfigurationError, match=what):
        settings({name: value})


def test_an_unknown_option_of_ours_is_refused_and_those_of_others_are_left_to_them():
    with pytest.raises(ConfigurationError, match=r"'toc_slot' in broker_.*'toc_slots'"):
        settings(toc_slot=8)
    assert settings(max_retries=3, fanout_prefix=True, retry_on_timeout=True) == Settings()
    assert settings({"max_retries": "3", "retry_on_timeout": "1"}) == Settings()


def test_a_transport_option_without_effect_is_named_and_why():
    assert settings(visibilty_timeout=3600, fanout_prefix=True, wait_time_seconds=3).ignored == [
        "'visibilty_timeout' (no such option; did you mean 'visibility_timeout'?)",
        "'fanout_prefix' (an option of Kombu's redis transport, not needed here)",
        "'wait_time_seconds' (no such option)",
    ]


def test_a_center_refuses_an_option_that_there_is_not_and_that_of_an_app_leaves_it_out():
    for make in (center_for, TimeoutCenter.from_url, AsyncTimeoutCenter.from_url):
        with pytest.raises(ConfigurationError) as raised:
            make("toc+redis://localhost", visibilty_timeout=5)
        assert str(raised.value) == (
            "unknown option 'visibilty_timeout' in the options of a center; "
            "did you mean 'visibility_timeout'?"
        )
    with Celery("shop", broker="toc+redis://localhost", set_as_current=False) as app:
        app.conf.broker_transport_options = {"wait_time_seconds": 3, "visibility_timeout": 7}
        assert timeout_center(app).limits.visibility == 7


@pytest.mark.versions
def test_an_option_of_kombus_own_is_not_said_to_be_without_effect():
    """Those that its connections and its virtual transports read, whatever the transport is."""
    general = {
        "max_retries": 3,
        "interval_start": 0,
        "interval_step": 1,
        "interval_max": 1,
        "retry_errors": None,
        "connect_retries_timeout": 3,
        "queue_order_strategy": "sorted",
        "polling_interval": 1,
        "body_encoding": "base64",
        "deadletter_queue": "dead",
    }
    assert settings(**general).ignored == []


@pytest.mark.versions
def test_every_option_of_kombus_redis_transport_is_known_by_name():
    """Whoever comes from it is told what each has become, in every version of Kombu."""
    ours = {**dict.fromkeys(SentinelChannel.from_transport_options, "1")}
    ours.update(
        priority_steps=[0],
        sentinel_kwargs={},
        queue_order_strategy="sorted",
        socket_keepalive_options={},
    )
    assert not [said for said in settings(**ours).ignored if "no such option" in said]


@each(
    ("value", "slots"),
    [
        ("0-3,6", (0, 1, 2, 3, 6)),
        (" 2, 1 ", (1, 2)),
        ([4, "0-1"], (0, 1, 4)),
        ([], ()),
        ({"mail": [1, 0], "sms": "7"}, {"mail": (0, 1), "sms": (7,)}),
    ],
)
def test_slots_are_preferred_by_numbers_and_ranges_for_all_topics_or_for_some(value, slots):
    assert settings(toc_prefer_slots=value).toc_prefer_slots == slots
    if isinstance(value, str):
        assert settings({"toc_prefer_slots": value}).toc_prefer_slots == slots


@each(
    ("name", "value"),
    [
        ("visibility_timeout", "soon"),
        ("visibility_timeout", 0),
        ("visibility_timeout", float("nan")),
        ("priority_steps", "1,2"),
        ("priority_steps", 7),
        ("priority_steps", [0, float("inf")]),
        ("toc_retries", "many"),
        ("toc_retries", 32),
        ("toc_retries", -1),
        ("toc_topics", ["mail"]),
        *(("toc_topics", value) for value in ({"mail": 8}, {1: {}}, {"mail": {1: 2}})),
        ("toc_lookahead", -0.1),
        ("toc_queue_after", "x"),
        ("toc_poll_interval", 0),
        *(
            ("toc_prefer_slots", value)
            for value in ("a", "3-1", "-1", "0-512", "", 7, True, [True], [1.5], None, "1,,2")
        ),
        ("toc_prefer_slots", {"mail": "x"}),
        ("toc_poll_interval", float("inf")),
        ("toc_deflate", "perhaps"),
        ("toc_fanout_length", "long"),
        ("toc_stale_after", 0),
        ("toc_retry_backoff", -1),
        ("toc_retry_backoff_max", "long"),
        ("toc_dead_age", 0),
        ("toc_dead_limit", 0),
        ("toc_dead_limit", "some"),
        ("toc_wait_replicas", -1),
        ("toc_wait_timeout", 0),
    ],
)
def test_a_bad_value_is_refused_and_its_option_named(name, value):
    with pytest.raises(ConfigurationError, match=name.removeprefix("toc_").split("_")[0]):
        settings(**{name: value})


@pytest.mark.versions
def test_redis_pys_own_options_reach_its_connections():
    address = read_url("toc+redis://h/3?socket_timeout=2.5&client_name=web")
    with connect(address, read(address.query, {"socket_connect_timeout": 7})) as client:
        arguments = client.connection_pool.connection_kwargs
    assert arguments["socket_timeout"] == 2.5
    assert arguments["client_name"] == "web"
    assert arguments["socket_connect_timeout"] == 7
    assert arguments["db"] == 3


@pytest.mark.versions
@each("name", ["decode_responses", "protocol", "parser_class"])
def test_options_of_redis_py_that_would_break_the_transport_are_not_known(name):
    with pytest.raises(ConfigurationError, match=name):
        settings({name: "1"})


# -- URLs


WHOLE = {
    **{"kind": "redis", "host": "example.org", "port": 7000, "db": 2},
    **{"username": "me", "password": SECRET, "query": {"toc_slots": "4"}},
}
#: What a URL leaves out.
PLAIN = {"host": "localhost", "port": 6379, "db": 0, "username": None, "password": None}


@each(
    ("url", "says"),
    [
        *(
            (f"{scheme}://me:{SECRET}@example.org:7000/2?toc_slots=4", WHOLE)
            for scheme in ("toc", "toc+redis", "redis")
        ),
        *((url, PLAIN) for url in ("toc://", "toc+redis://", "toc+redis://localhost/")),
        ("toc://:6379", PLAIN),
        ("toc+embedded:///var/lib/shop", {"path": "/var/lib/shop"}),
        ("toc+embedded://", {"path": ""}),
        ("toc+embedded:///var/lib/shop?db=2", {"db": 2}),
        ("toc+redis://m%40e:p%2Fw%3A%3F@h/0", {"username": "m@e", "password": "p/w:?"}),
        ("toc+redis://[::1]:7000/0", {"host": "::1"}),
        ("toc://[::1]", {"port": 6379}),
    ],
)
def test_a_url_says_where_the_server_is(url, says):
    """X7"""
    made = read_url(url)
    assert {name: getattr(made, name) for name in says} == says


def test_rediss_means_tls():
    address = read_url("toc+rediss://h:6380/1?ssl_cert_reqs=none")
    assert (address.kind, address.port, address.db) == ("rediss", 6380, 1)
    with connect(address, read(address.query, {})) as client:
        assert issubclass(client.connection_pool.connection_class, redis.SSLConnection)
        assert client.connection_pool.connection_kwargs["ssl_cert_reqs"] == "none"


@pytest.mark.versions
def test_broker_use_ssl_means_tls_for_the_apps_center_too():
    app = Celery(broker="toc+redis://h:6380/1", broker_use_ssl={"ssl_cert_reqs": "none"})
    pool = timeout_center(app).client.connection_pool
    assert issubclass(pool.connection_class, redis.SSLConnection)
    assert pool.connection_kwargs["ssl_cert_reqs"] == "none"


def test_unix_names_a_socket_and_perhaps_a_database():
    address = read_url(f"toc+unix://:{SECRET}@/run/redis%20a.sock?db=4")
    assert (address.kind, address.path, address.db) == ("unix", "/run/redis a.sock", 4)
    assert address.password == SECRET
    assert read_url("toc+unix:///run/redis.sock?virtual_host=2").db == 2
    with connect(address, read(address.query, {})) as client:
        assert client.connection_pool.connection_class is redis.UnixDomainSocketConnection
        assert client.connection_pool.connection_kwargs["path"] == "/run/redis a.sock"


@each(
    ("url", "what"),
    [
        ("toc+unix://", "name the socket"),
        *(
            (url, r"toc\+redis")
            for url in ("amqp://h", "toc+http://h", "redis+toc://h", "h:6379", "")
        ),
        ("toc+cluster://", "name a node"),
        ("toc+cluster://h1:7000,h2:x/0", "cannot be read"),
        # What to use instead is named.
        ("toc+cluster://h1:7000,h2:7000/3", r"only 0; leave /3 out.*global_keyprefix"),
        ("toc+sentinel://h1/0;sentinel://h2/1", "differ in database"),
        ("toc+sentinel://h1?master_name=a;sentinel://h2?master_name=b", "differ in .master_name"),
        ("toc+sentinel://a:x@h1;sentinel://b:x@h2", "differ in user"),
        ("toc+sentinel://h1;redis://h2", "sentinels stand among others"),
        ("toc+sentinel://h1:port,h2", "cannot be read"),
        ("toc+sentinel://h1/x", "database must be a number"),
        *(
            (url, "database must be a number")
            for url in ("toc://h/x", "toc://h/-1", "toc://h?db=x", "toc://h/\u00b2")
        ),
        *((url, "cannot be read") for url in ("toc://h:port", "toc://h:99999", "toc://[::1")),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_and_what_is_wrong_told(url, what):
    """K8"""
    with pytest.raises(ConfigurationError, match=what):
        read_url(url)


def test_a_cluster_is_named_by_some_of_its_nodes():
    """K8"""
    address = read_url("toc+cluster://me:s%40fe@h1:7000,[::1]:7001,h3?toc_poll_interval=2")
    assert address.hosts == (("h1", 7000), ("::1", 7001), ("h3", 6379))
    assert (address.username, address.password) == ("me", "s@fe")
    assert address.query == {"toc_poll_interval": "2"}
    assert read_url("toc+cluster://h1:7000,h2:7000/0").hosts == (("h1", 7000), ("h2", 7000))


# -- Sentinel


@each(
    "url",
    [
        "toc+sentinel://me:pw@h1:7000,h2,[::1]:7001/3?master_name=m",
        "sentinel://me:pw@h1:7000,me:pw@h2:26379,[::1]:7001/3?master_name=m",
        "toc+sentinel://me:pw@h1:7000;sentinel://h2;toc+sentinel://[::1]:7001/3?master_name=m",
        "toc+sentinel://h1:7000/3?master_name=m;sentinel://me:pw@h2/3;sentinel://[::1]:7001",
    ],
)
def test_sentinels_are_named_with_commas_or_as_kombu_names_them(url):
    made = read_url(url)
    assert made.hosts == (("h1", 7000), ("h2", 26379), ("::1", 7001))
    assert (made.kind, made.db, made.username, made.password) == ("sentinel", 3, "me", "pw")
    assert made.query == {"master_name": "m"}
    assert sentinel_url(made) == "sentinel://me@h1:7000,h2:26379,[::1]:7001/3?master_name=m"
    assert read_url(sentinel_url(made)).hosts == made.hosts


def test_settings_are_shown_without_secrets():
    shown = repr(read({"password": SECRET}, {"ssl_password": SECRET, "socket_timeout": 3}))
    assert SECRET not in shown
    assert "'password': '**', " in shown.replace("'ssl_", "'") and "'socket_timeout': 3" in shown
    assert "visibility_timeout=60.0" in shown


@pytest.mark.versions
def test_kombus_options_for_sentinel_are_understood():
    made = settings(master_name="m", min_other_sentinels="1", sentinel_kwargs={"password": "x"})
    assert (made.master_name, made.min_other_sentinels) == ("m", 1)
    assert made.sentinel_kwargs == {"password": "x"}
    assert settings(master_name=None, min_other_sentinels=None, sentinel_kwargs=None) == Settings()
    assert SECRET not in repr(settings(sentinel_kwargs={"password": SECRET}))
    with pytest.raises(ConfigurationError, match=r"'pasword' in sentinel_kwargs.*'password'"):
        settings(sentinel_kwargs={"pasword": "x"})
    with pytest.raises(ConfigurationError, match="must map"):
        settings(sentinel_kwargs="password")
    with pytest.raises(ConfigurationError, match=r"sentinel_kwargs.*broker_transport_options"):
        settings({"sentinel_kwargs": "x"})


# -- TLS


@each(
    "value",
    ["CERT_NONE", "none", "ssl.CERT_NONE", "0", None, ssl.CERT_NONE, "VerifyMode.CERT_NONE"],
)
def test_no_check_of_certificates_may_be_spelled_as_users_do(value):
    made = tls_arguments({"ssl_cert_reqs": value})
    assert made == {"ssl_cert_reqs": "none", "ssl_check_hostname": False}


def test_certificates_and_names_are_checked_unless_told_otherwise():
    for said in ({}, {"ssl_cert_reqs": "CERT_REQUIRED"}, {"ssl_cert_reqs": ssl.CERT_REQUIRED}):
        assert tls_arguments(said) == {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


@each("url", ["toc+redis://h", "toc+unix:///s", "toc+sentinel://h?master_name=m"])
def test_tls_options_without_tls_are_refused(url):
    address = read_url(url)
    with pytest.raises(ConfigurationError, match=r"ssl_ca_certs is for TLS: use toc\+rediss"):
        connect(address, read(address.query, {"ssl_ca_certs": "/ca.pem"}))


# -- passwords


@each(
    "url",
    [
        f"toc+redis://:{SECRET}@h/0",
        f"toc+redis://me:{SECRET}@h:6379/0?toc_slots=4",
        f"toc+redis://me:a:{SECRET}@h",
        f"toc+redis://:{SECRET}@x@h/0",
        f"toc+redis://h/0?password={SECRET}&db=1",
        f"toc+rediss://h/0?ssl_password={SECRET}",
        f"toc+sentinel://:{SECRET}@h1:26379,:{SECRET}@h2:26379/0",
        f"toc+redis://:{SECRET}@h1/0;toc+redis://:{SECRET}@h2/0",
        # not percent-encoded, as it happens:
        f"toc+redis://:pa/{SECRET}@h/0",
        f"toc+redis://:{SECRET}/x@h/0",
        f"toc+redis://me:{SECRET}?x@h/0",
        f"toc+redis://me:{SECRET}#x@h/0",
        f"toc+redis://me:12/{SECRET}@h/0",
        f"redis:{SECRET}@h",
        f"toc+redis:/:{SECRET}@h/0",
        f"amqp://me:{SECRET}@h//",
        f"toc+redis://me:{SECRET}\u2100@h/0",
        f"toc+redis://me:{SECRET}@h:port/0",
        f"toc+redis://me:{SECRET}@h/notadb",
        f"toc+unix://me:{SECRET}@",
        f"toc+redis://me:{SECRET}@[::1/0",
    ],
)
def test_no_password_is_ever_shown(url):
    check_hidden(url)


@given(st.text(st.characters(codec="utf-8", exclude_characters=";"), min_size=1, max_size=12))
def test_no_password_is_shown_whatever_characters_it_has(tail):
    check_hidden(f"toc+redis://me:{SECRET}{tail}@h/0")


def check_hidden(url):
    assert SECRET not in mask_password(url)
    try:
        shown = repr(read_url(url))
    except ConfigurationError as exc:
        shown = str(exc)
        assert exc.__suppress_context__ or exc.__context__ is None
    assert SECRET not in shown


@each(
    ("url", "shown"),
    [
        *(
            (url, url)
            for url in (
                *("toc+redis://h:6379/0", "toc+redis://me@h/0", "toc+embedded://"),
                *("toc+redis://h:6379/0?client_name=a@b", "toc+unix:///run/a:b@c.sock"),
            )
        ),
        (
            "toc+redis://me:x@h:1/2?a=b&password=y&c=d",
            "toc+redis://me:**@h:1/2?a=b&password=**&c=d",
        ),
    ],
)
def test_what_is_no_password_stays_to_be_seen(url, shown):
    assert mask_password(url) == shown


@pytest.mark.parametrize("name", ["toc_pop_bytes", "toc_fanout_length"])
def test_a_number_that_only_costs_memory_has_no_upper_bound(name):
    assert getattr(read({}, {name: 2**40}), name) == 2**40
