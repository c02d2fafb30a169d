//! Rules of RFC 9110 and RFC 9112 about requests that a server must refuse, must accept or may decide on.
//!
//! Each row sends a request and a second one right after it. If the first is refused, the second must get no answer,
//! because the end of a refused request is unknown (RFC 9112 §9.3).

use std::time::Duration;

use metadata_datapath::stack::StackConfig;
use support::pattern::{Answered, responses, stack};
use support::wire::{Client, Faults, Habits, World};

/// Time within which any answer arrives.
const SOON: Duration = Duration::from_secs(1);
const SECOND: &str = "GET /bytes/7 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

/// Sends `bytes` and then [`SECOND`]; returns the answers.
fn ask(bytes: &[u8]) -> Vec<Answered> {
    let (stack, _) = stack(StackConfig::default());
    let mut world = World::new(stack, Client::new(3, Habits::default()), Faults::NONE, 0);
    let talk = world.client.begin(40_000, &[bytes, SECOND.as_bytes()].concat());
    world.wait(SOON);
    let talk = &world.client.talks[talk];
    assert!(talk.ended, "the connection stays open after {:?}", String::from_utf8_lossy(bytes));
    responses(&talk.received, &[bytes.starts_with(b"HEAD ")])
}

/// A rule's section, the request and the status of its answer.
type Row<'a> = (&'a str, &'a str, u16);

fn assert_rows(rows: &[Row<'_>]) {
    let mut wrong = Vec::new();
    for (section, request, status) in rows {
        let answers = ask(request.as_bytes());
        let found: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
        // The connection closes after a 204, too.
        let expected = if *status < 400 && *status != 204 { vec![*status, 200] } else { vec![*status] };
        if found != expected {
            wrong.push(format!("{section} {request:?}: expected {expected:?}, found {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} rows:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
}

#[test]
fn every_request_of_http_1_1_has_one_valid_host() {
    let rows: &[Row<'_>] = &[
        ("9112 §3.2", "GET /some HTTP/1.1\r\n\r\n", 400),
        ("9112 §3.2", "HEAD /some HTTP/1.1\r\n\r\n", 400),
        ("9112 §3.2", "OPTIONS * HTTP/1.1\r\n\r\n", 400),
        ("9112 §3.2", "PUT /echo HTTP/1.1\r\nContent-Length: 2\r\n\r\nok", 400),
        ("9112 §3.2", "GET /some HTTP/1.2\r\n\r\n", 400),
        ("9112 §3.2", "GET /some HTTP/1.1\r\nX-Host: x\r\n\r\n", 400),
        ("9112 §3.2", "GET /some HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
        ("9112 §3.2", "GET /some HTTP/1.1\r\nHost: x\r\nhost: y\r\n\r\n", 400),
        ("9112 §3.2", "GET /some HTTP/1.1\r\nHost: x\r\nHost:\r\n\r\n", 400),
        ("9112 §3.2", "GET /some HTTP/1.0\r\nConnection: keep-alive\r\nHost: x\r\nHost: x\r\n\r\n", 400),
        ("9112 §3.2", "GET /some HTTP/1.0\r\nConnection: keep-alive\r\nHost: x y\r\n\r\n", 400),
        ("9112 §3.2", "GET /some HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", 200),
        ("9112 §3.2", "GET /some HTTP/1.1\r\nhOsT:x\r\n\r\n", 200),
    ];
    assert_rows(rows);
}

#[test]
fn a_host_is_a_name_or_address_with_an_optional_port() {
    let valid = "x metadata metadata.google.internal metadata.google.internal. METADATA_1~a a%2db \
                 a!$&'()*+,;=b 169.254.169.254 169.254.169.254:80 169.254.169.254: :80 [fd00:ec2::254] \
                 [fd00:ec2::254]:80 [FE80::A9FE:A9FE] [::ffff:169.254.169.254] [fe80::a9fe:a9fe%25eth0] \
                 [fe80::a9fe:a9fe%eth0]:80 [v1.x:y]";
    let invalid = "a\tb a/b http://x user@x x:80:80 x:http x:-1 x?y x#y a\\b a\"b <x> a%2 a%zz fd00:ec2::254 \
                 [fd00:ec2::254 fd00:ec2::254] [fd00:ec2::254]x [fd00:ec2::254]:x [x] [] [169.254.169.254] \
                 [fe80::1%] [fe80::1%a/b] [v.x] [v1.] [vg.x] m\u{e9}tadata";
    let request = |host: &str| format!("GET /some HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let with = |hosts: &str, one: &str, status: u16| -> Vec<(String, u16)> {
        hosts.split(' ').chain([one]).map(|host| (request(host), status)).collect()
    };
    let requests = [with(valid, "", 200), with(invalid, "a b", 400)].concat();
    let rows: Vec<_> =
        requests.iter().map(|(request, status)| ("9110 §7.2", request.as_str(), *status)).collect();
    assert_rows(&rows);
}

#[test]
fn each_target_form_is_limited_to_its_methods_and_scheme() {
    let rows: &[Row<'_>] = &[
        // Absolute form: the target's authority counts, and a Host field is still required.
        ("9112 §3.2.2", "GET http://x/some HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        ("9112 §3.2.2", "GET http://x/some HTTP/1.1\r\nHost: y:81\r\n\r\n", 200),
        ("9112 §3.2.2", "GET HTTP://[fd00:ec2::254]:80/some HTTP/1.1\r\nHost: y\r\n\r\n", 200),
        ("9112 §3.2.2", "GET http://x/some HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", 200),
        ("9112 §3.2.2", "GET http://x/some HTTP/1.1\r\n\r\n", 400),
        ("9112 §3.2.2", "GET http://x/some HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
        ("9112 §3.2.2", "GET http://x/some HTTP/1.1\r\nHost: y z\r\n\r\n", 400),
        ("9110 §4.2.1", "GET http:///some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9110 §4.2.1", "GET http://:80/some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9110 §4.2.1", "GET http://?some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9110 §4.2.4", "GET http://user:word@x/some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("3986 §3.2.2", "GET http://[x]/some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        // A plain connection serves only the scheme http.
        ("9110 §7.4", "GET https://x/some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9110 §7.4", "GET ftp://x/some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        // Authority form is for CONNECT, which this server does not support; the asterisk is for OPTIONS.
        ("9112 §3.2.3", "GET x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §3.2.3", "CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n", 400),
        ("9112 §3.2.4", "GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §3.2.4", "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 204),
    ];
    assert_rows(rows);
}

#[test]
fn line_ends_and_fields_follow_the_grammar() {
    let rows: &[Row<'_>] = &[
        // Line ends: a server may accept a bare LF but not a bare CR.
        ("9112 §2.2", "GET /some HTTP/1.1\nHost: x\n\n", 200),
        ("9112 §2.2", "\r\nGET /some HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        ("9112 §2.2", "\rGET /some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §2.2", "\r\r\nGET /some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\rHost: x\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\r\r\nHost: x\r\n\r\n", 400),
        ("9112 §2.2", "GET /no\rne HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\r\nHost: x\r\nA: b\rC: d\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\r\nHost: x\r\nA: b\r\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\r\nHost: x\r\nA: \rb\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\r\nHost: x\r\n\rA: b\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\r\nHost: x\r\nA\r: b\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\r\nHost: x\r\n\r\r\n\r\n", 400),
        // White space.
        ("9112 §2.2", "GET /some HTTP/1.1\r\n Host: x\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\r\n\tA: b\r\nHost: x\r\n\r\n", 400),
        ("9112 §2.2", "GET /some HTTP/1.1\r\n \r\nHost: x\r\n\r\n", 400),
        ("9112 §5.1", "GET /some HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n", 400),
        ("9112 §5.1", "GET /some HTTP/1.1\r\nHost: x\r\nA\t: b\r\n\r\n", 400),
        ("9112 §5.1", "GET /some HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        ("9112 §5.2", "GET /some HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400),
        ("9112 §5.2", "GET /some HTTP/1.1\r\nHost: x\r\nA: b\r\n\tc\r\n\r\n", 400),
        ("9112 §5.2", "GET /some HTTP/1.1\r\nHost: x\r\nA:\r\n b\r\n\r\n", 400),
        ("9112 §5.2", "GET /some HTTP/1.1\r\nHost:\r\n x\r\n\r\n", 400),
        ("9112 §5.1", "GET /some HTTP/1.1\r\nHost: x\r\nA:\t b \t\r\n\r\n", 200),
        // Names are tokens; values contain no control characters.
        ("9110 §5.1", "GET /some HTTP/1.1\r\nHost: x\r\nA\r\n\r\n", 400),
        ("9110 §5.1", "GET /some HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n", 400),
        ("9110 §5.1", "GET /some HTTP/1.1\r\nHost: x\r\nA(: b\r\n\r\n", 400),
        ("9110 §5.1", "GET /some HTTP/1.1\r\nHost: x\r\nA\0: b\r\n\r\n", 400),
        ("9110 §5.5", "GET /some HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n", 400),
        ("9110 §5.5", "GET /some HTTP/1.1\r\nHost: x\r\nA: \u{7f}\r\n\r\n", 400),
        ("9110 §5.5", "GET /some HTTP/1.1\r\nHost: x\r\nA:\r\n\r\n", 200),
        ("9110 §5.5", "GET /some HTTP/1.1\r\nHost: x\r\nA: \u{e9}\r\n\r\n", 200),
        // The request line.
        ("9112 §3", "GET  /some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §3", "GET /some  HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §3", "GET /some HTTP/1.1 \r\nHost: x\r\n\r\n", 400),
        ("9112 §3", " GET /some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §3", "GET\t/some HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §2.3", "GET /some http/1.1\r\nHost: x\r\n\r\n", 400),
        ("9112 §2.3", "GET /some HTTP/1.10\r\nHost: x\r\n\r\n", 400),
        ("9110 §2.5", "GET /some HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    ];
    assert_rows(rows);
}

#[test]
fn a_body_has_one_unambiguous_framing() {
    let put = |fields: &str, body: &str| format!("PUT /echo HTTP/1.1\r\nHost: x\r\n{fields}\r\n{body}");
    let chunked = |body: &str| put("Transfer-Encoding: chunked\r\n", body);
    let coded = |coding: &str| put(&format!("Transfer-Encoding: {coding}\r\n"), "2\r\nok\r\n0\r\n\r\n");
    let rows = [
        // Lengths.
        ("9112 §6.3", put("Content-Length: 2\r\n", "ok"), 200),
        ("9112 §6.3", put("Content-Length: 2\r\nContent-Length: 2\r\n", "ok"), 200),
        ("9112 §6.3", put("Content-Length: 2\r\nContent-Length: 3\r\n", "ok"), 400),
        ("9112 §6.3", put("Content-Length: 2, 3\r\n", "ok"), 400),
        ("9112 §6.3", put("Content-Length: -2\r\n", "ok"), 400),
        ("9112 §6.3", put("Content-Length: +2\r\n", "ok"), 400),
        ("9112 §6.3", put("Content-Length: 0x2\r\n", "ok"), 400),
        ("9112 §6.3", put("Content-Length: 2 2\r\n", "ok"), 400),
        ("9112 §6.3", put("Content-Length: two\r\n", "ok"), 400),
        ("9112 §6.3", put("Content-Length:\r\n", "ok"), 400),
        // Codings: chunked must be last and occur once, or the end of the body is unknown.
        ("9112 §6.3", coded("chunked"), 200),
        ("9112 §7", coded("CHUNKED"), 200),
        ("9110 §5.6.1", coded(", chunked,"), 200),
        ("9112 §6.3", coded("gzip"), 400),
        ("9112 §6.3", coded("identity"), 400),
        ("9112 §6.3", coded("chunked, gzip"), 400),
        ("9112 §6.3", coded("chunked\r\nTransfer-Encoding: identity"), 400),
        ("9112 §6.3", coded(""), 400),
        ("9112 §6.3", coded("chunked;q=1"), 400),
        ("9112 §6.3", coded("xchunked"), 400),
        ("9112 §6.1", coded("chunked, chunked"), 400),
        ("9112 §6.1", coded("chunked\r\nTransfer-Encoding: chunked"), 400),
        ("9112 §6.1", coded("gzip, chunked"), 501),
        ("9112 §6.1", coded("gzip\r\nTransfer-Encoding: chunked"), 501),
        // Both framings, or a coding in HTTP/1.0.
        (
            "9112 §6.3",
            put("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", "2\r\nok\r\n0\r\n\r\n"),
            400,
        ),
        (
            "9112 §6.3",
            put("Transfer-Encoding: chunked\r\nContent-Length: 2\r\n", "2\r\nok\r\n0\r\n\r\n"),
            400,
        ),
        ("9112 §6.3", put("Transfer-Encoding: gzip\r\nContent-Length: 2\r\n", "ok"), 400),
        (
            "9112 §6.1",
            "PUT /echo HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
                .to_owned(),
            400,
        ),
        // Chunks.
        ("9112 §7.1", chunked("2;a=b;c\r\nok\r\n0;d\r\n\r\n"), 200),
        ("9112 §7.1.1", chunked("2 ;a\r\nok\r\n0\r\n\r\n"), 200),
        ("9112 §7.1.2", chunked("2\r\nok\r\n0\r\nA: b\r\n\r\n"), 200),
        ("9112 §7.1", chunked("2\r\nokay\r\n0\r\n\r\n"), 400),
        ("9112 §7.1", chunked("0x2\r\nok\r\n0\r\n\r\n"), 400),
        ("9112 §7.1", chunked("-2\r\nok\r\n0\r\n\r\n"), 400),
        ("9112 §7.1", chunked("fffffffffffffffff\r\nok\r\n0\r\n\r\n"), 400),
        ("9112 §7.1", chunked("\r\nok\r\n0\r\n\r\n"), 400),
        ("9112 §7.1", chunked("2\nok\r\n0\r\n\r\n"), 400),
        ("9112 §7.1", chunked("2;a\nok\r\n0\r\n\r\n"), 400),
        ("9112 §2.2", chunked("2\rok\r\n0\r\n\r\n"), 400),
        ("9112 §2.2", chunked("2;a\rb\r\nok\r\n0\r\n\r\n"), 400),
        ("9112 §2.2", chunked("2\r\nok\r0\r\n\r\n"), 400),
        ("9112 §2.2", chunked("2\r\nok\r\n0\r\nA: b\rc\r\n\r\n"), 400),
        // Expectations.
        ("9110 §10.1.1", put("Expect: 200-ok\r\nContent-Length: 2\r\n", "ok"), 417),
    ];
    let rows: Vec<_> =
        rows.iter().map(|(section, request, status)| (*section, request.as_str(), *status)).collect();
    assert_rows(&rows);
}
