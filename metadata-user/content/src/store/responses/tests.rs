use std::sync::{Arc, LazyLock};

use super::{Endpoint, Host, LiveOutcome, Methods, Responses, Route, VmState};
use crate::http::{Headers, Method, Request, RequestTarget, Response, StatusCode};
use crate::store::LiveRoute;
use crate::store::{Condition, LiveRequest, RequestGuard};
use metadata_common::addresses::Connection;
use metadata_common::time::Now;

fn text(body: &'static str) -> Endpoint {
    Endpoint::Fixed(Response::new(StatusCode(200), Some("text/plain; charset=utf-8"), &[], body))
}

/// Answers with the part of the path below its route.
#[derive(Debug)]
struct Below;

impl LiveRoute for Below {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        Response::new(StatusCode(200), None, &[], format!("[{}]", call.rest)).into()
    }

    fn about(&self) -> &'static str {
        "what lies below"
    }
}

fn ask_at(
    responses: &Responses,
    local: (&str, u16),
    method: Method,
    path: &str,
    fields: &[(&str, &str)],
) -> Response {
    let fields: Vec<_> =
        fields.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
    let target = RequestTarget { path, query: "" };
    let request = Request { method, target, headers: Headers::new(&fields), body: b"" };
    let local = (local.0.parse().expect("an address"), local.1);
    let connection = Connection { slot: 0, local, remote: ("10.0.0.2".parse().expect("an address"), 40_000) };
    let now = Now { mono: std::time::Duration::ZERO, unix_seconds: 0 };
    match responses.answer(now, &connection, &request, None) {
        LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => response,
        LiveOutcome::Park(parked) => panic!("{path} is parked: {parked:?}"),
    }
}

fn ask(responses: &Responses, method: Method, path: &str, fields: &[(&str, &str)]) -> Response {
    ask_at(responses, ("169.254.169.254", 80), method, path, fields)
}

static GUARDS: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| {
    [
        RequestGuard {
            condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
            otherwise: Response::error(StatusCode(403), &[]),
        },
        RequestGuard {
            condition: Condition::HeaderIs { name: "Metadata", value: "true" },
            otherwise: Response::error(StatusCode(400), &[]),
        },
    ]
});

fn responses() -> Responses {
    let mut builder = Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
    let put = Methods::of(&[Method::Options, Method::Put]);
    for (path, route) in [
        ("/b", Route::new("b", text("secret")).guarded(&*GUARDS)),
        ("/a", Route::new("a", text("open"))),
        ("/a", Route::new("late", text("later"))),
        ("/put", Route::new("a", text("made")).methods(put)),
        ("/tree", Route::new("a", Endpoint::Live(Arc::new(Below))).and_below()),
        ("/tree/leaf", Route::new("a", text("leaf"))),
        ("/latest/x", Route::new("a", text("of every date"))),
    ] {
        builder.add(Host::Metadata, path, route);
    }
    builder.add(Host::Scaleway, "/a", Route::new("scaleway", text("elsewhere")));
    builder.add(Host::Password, "/", Route::new("password", Endpoint::Live(Arc::new(Below))).and_below());
    builder.build()
}

fn body(response: &Response) -> String {
    String::from_utf8(response.body().to_bytes().to_vec()).expect("text")
}

#[test]
fn known_paths_are_answered_and_others_not_found() {
    for (path, status, said) in [
        ("/a", 200, "open"),
        ("/", 404, "Not Found\n"),
        ("/a/b", 404, "Not Found\n"),
        ("/A", 404, "Not Found\n"),
        ("/tree", 200, "[]"),
        ("/tree/leaf", 200, "leaf"),
        ("/tree/other", 200, "[/other]"),
        ("/tree/leaf/below", 200, "[/leaf/below]"),
        ("/trees", 404, "Not Found\n"),
        ("/2021-03-23/x", 200, "of every date"),
        ("/ec2/1.0/x", 200, "of every date"),
    ] {
        let answer = ask(&responses(), Method::Get, path, &[]);
        assert_eq!((answer.status().0, body(&answer).as_str()), (status, said), "{path}");
    }
}

#[test]
fn the_address_selects_the_host_before_the_path_is_looked_up() {
    for (local, path, status, said) in [
        (("169.254.42.42", 80), "/a", 200, "elsewhere"),
        (("fd00:42::42", 80), "/a", 200, "elsewhere"),
        (("169.254.42.42", 80), "/b", 404, "Not Found\n"),
        (("fe80::a9fe:a9fe", 80), "/a", 200, "open"),
        (("168.63.129.16", 80), "/a", 404, "Not Found\n"),
        (("100.100.100.200", 80), "/a", 404, "Not Found\n"),
        (("169.254.169.254", 8080), "/a", 200, "[/a]"),
        (("169.254.169.254", 8080), "/", 200, "[]"),
    ] {
        let answer = ask_at(&responses(), local, Method::Get, path, &[]);
        assert_eq!((answer.status().0, body(&answer).as_str()), (status, said), "{path} at {local:?}");
    }
}

#[test]
fn a_path_deeper_than_any_served_is_not_found() {
    let deep = "/x".repeat(1_000);
    assert_eq!(ask(&responses(), Method::Get, &deep, &[]).status(), StatusCode(404));
}

#[test]
fn head_gets_the_answer_to_get() {
    for path in ["/a", "/b", "/nope", "/tree/x"] {
        let responses = responses();
        assert_eq!(ask(&responses, Method::Head, path, &[]), ask(&responses, Method::Get, path, &[]));
    }
}

#[test]
fn a_method_that_a_route_does_not_answer_gets_405() {
    for (path, method, allow) in [
        ("/a", Method::Post, "GET, HEAD"),
        ("/b", Method::Put, "GET, HEAD"),
        ("/nope", Method::Patch, "GET, HEAD"),
        ("/a", Method::Delete, "GET, HEAD"),
        ("/a", Method::Options, "GET, HEAD"),
        ("/a", Method::Other, "GET, HEAD"),
        ("/put", Method::Get, "OPTIONS, PUT"),
        ("/put", Method::Head, "OPTIONS, PUT"),
    ] {
        let answer = ask(&responses(), method, path, &[]);
        assert_eq!(
            (answer.status(), answer.field("allow")),
            (StatusCode(405), Some(allow)),
            "{method:?} {path}"
        );
    }
    assert_eq!(body(&ask(&responses(), Method::Put, "/put", &[])), "made");
}

#[test]
fn the_first_guard_that_fails_determines_the_answer() {
    let xff = ("x-forwarded-for", "");
    for (fields, status) in [
        (&[][..], 400),
        (&[("Metadata", "false")][..], 400),
        (&[("Metadata", "")][..], 400),
        (&[("metadata", "TRUE")][..], 200),
        (&[("Metadata", "True"), xff][..], 403),
        (&[xff][..], 403),
    ] {
        assert_eq!(ask(&responses(), Method::Get, "/b", fields).status().0, status, "{fields:?}");
    }
}

/// Routes of two dialects at one path: one for any reader, one for readers with a header, one for writers.
fn shared() -> Responses {
    let mut builder = Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
    let put = Methods::of(&[Method::Put]);
    for (path, route) in [
        ("/s", Route::new("first", text("plain"))),
        ("/s", Route::new("second", text("late"))),
        ("/s", Route::new("second", text("with header")).when("X-Token")),
        ("/s", Route::new("second", text("written")).methods(put)),
        ("/only", Route::new("second", text("only")).when("X-Token")),
        ("/tree", Route::new("first", text("leaf"))),
        ("/tree", Route::new("second", Endpoint::Live(Arc::new(Below))).and_below()),
    ] {
        builder.add(Host::Metadata, path, route);
    }
    builder.build()
}

#[test]
fn a_path_has_a_route_for_each_header_and_method() {
    let token = &[("x-token", "")][..];
    for (method, path, fields, status, said) in [
        (Method::Get, "/s", &[][..], 200, "plain"),
        (Method::Get, "/s", token, 200, "with header"),
        (Method::Head, "/s", token, 200, "with header"),
        (Method::Put, "/s", &[], 200, "written"),
        (Method::Put, "/s", token, 200, "written"),
        (Method::Get, "/only", token, 200, "only"),
        (Method::Get, "/only", &[], 404, "Not Found\n"),
        (Method::Get, "/tree", &[], 200, "leaf"),
        (Method::Get, "/tree/a", &[], 200, "[/a]"),
    ] {
        let answer = ask(&shared(), method, path, fields);
        assert_eq!(
            (answer.status().0, body(&answer).as_str()),
            (status, said),
            "{method:?} {path} {fields:?}"
        );
    }
    assert_eq!(
        shared().routes().filter(|(_, path, _)| *path == "/s").count(),
        3,
        "the later route is dropped"
    );
}

#[test]
fn allow_lists_the_methods_of_all_routes_of_a_path_once() {
    let token = &[("X-Token", "x")][..];
    for (path, fields, allow) in [
        ("/s", &[][..], "GET, HEAD, PUT"),
        ("/s", token, "GET, HEAD, PUT"),
        ("/only", token, "GET, HEAD"),
        ("/only", &[], "GET, HEAD"),
    ] {
        let answer = ask(&shared(), Method::Post, path, fields);
        assert_eq!(
            (answer.status(), answer.field("allow")),
            (StatusCode(405), Some(allow)),
            "{path} {fields:?}"
        );
    }
}
