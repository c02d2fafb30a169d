//! Checks each rule about requests and responses, each on a connection of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use metadata_content::dialect;
use metadata_content::http::parse::{FIELD_COUNT_MAX, FIELDS_MAX, TARGET_MAX};
use metadata_content::http::{Response, StatusCode};
use metadata_content::on_demand::OnDemand;
use metadata_content::record::Record;
use metadata_content::store::{Endpoint, Host, Interner, RequestLimit, Responses, Route, Store, VmState};
use metadata_datapath::stack::{Stack, StackConfig};
use metadata_user::service::{MetadataService, PUT_HOLD};
use support::pattern::{Answered, Pattern, responses, stack};
use support::record::Identity;
use support::wire::{Client, Faults, Habits, World};

const SOON: Duration = Duration::from_secs(1);

fn world() -> (World<MetadataService<Pattern>>, Arc<Pattern>) {
    let (stack, pattern) = stack(StackConfig::default());
    (World::new(stack, Client::new(3, Habits::default()), Faults::NONE, 0), pattern)
}

/// Sends `bytes`; returns the answers within a second, and whether the service closed the connection.
fn ask(bytes: &[u8]) -> (Vec<Answered>, bool) {
    let (mut world, _) = world();
    let talk = world.client.begin(40_000, bytes);
    world.wait(SOON);
    let heads: Vec<bool> = vec![bytes.starts_with(b"HEAD ")];
    let talk = &world.client.talks[talk];
    (responses(&talk.received, &heads), talk.ended)
}

/// A request for `/` with `bytes` of header fields.
fn with_fields(bytes: usize) -> Vec<u8> {
    let mut request = b"GET / HTTP/1.1\r\n".to_vec();
    let end = request.len() + bytes;
    request.extend(b"Host: x\r\n");
    while request.len() < end {
        let line = (end - request.len()).min(1000);
        let line =
            if end - request.len() - line < 6 && end - request.len() > line { line - 10 } else { line };
        request.extend(b"F: ");
        request.resize(request.len() + line - 5, b'v');
        request.extend(b"\r\n");
    }
    request.extend(b"\r\n");
    request
}

fn put(fields: &str, body: &[u8]) -> Vec<u8> {
    let mut request = format!("PUT /echo HTTP/1.1\r\nHost: x\r\n{fields}\r\n").into_bytes();
    request.extend(body);
    request
}

fn get(fields: &str) -> Vec<u8> {
    format!("GET /some HTTP/1.1\r\nHost: x\r\n{fields}\r\n").into_bytes()
}

fn line(line: &str) -> Vec<u8> {
    format!("{line}\r\nHost: x\r\n\r\n").into_bytes()
}

#[test]
fn each_request_gets_the_status_in_its_row() {
    let target = |bytes: usize| line(&format!("GET /{} HTTP/1.1", "a".repeat(bytes - 1)));
    // `get` adds one field, `Host`.
    let many = |n: usize| get(&"F: v\r\n".repeat(n - 1));
    let large = vec![b'x'; 64 * 1024];
    let chunks = |first: usize, second: usize| {
        let chunk = |bytes: usize| format!("{bytes:x}\r\n{}\r\n", "x".repeat(bytes));
        put(
            "Transfer-Encoding: chunked\r\n",
            format!("{}{}0\r\n\r\n", chunk(first), chunk(second)).as_bytes(),
        )
    };
    let keeps = false;
    let closes = true;
    let cases: Vec<(&str, Vec<u8>, u16, bool)> = vec![
        // Version
        ("HTTP/1.1", line("GET /some HTTP/1.1"), 200, keeps),
        ("HTTP/1.0", line("GET /some HTTP/1.0"), 200, closes),
        ("HTTP/1.0 keep-alive", get("Connection: keep-alive\r\n").to_vec(), 200, keeps),
        ("HTTP/1.2 is 1.1", line("GET /some HTTP/1.2"), 200, keeps),
        ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), 505, closes),
        ("HTTP/3.0", line("GET / HTTP/3.0"), 505, closes),
        ("HTTP/0.9 with version", line("GET / HTTP/0.9"), 505, closes),
        ("HTTP/0.9", line("GET /"), 400, closes),
        ("version in lower case", line("GET / http/1.1"), 400, closes),
        ("TLS", vec![0x16, 3, 1, 2, 0, 1, 0, 1], 400, closes),
        // Methods
        ("unknown method", line("BREW /some HTTP/1.1"), 405, keeps),
        ("method in lower case", line("get /some HTTP/1.1"), 405, keeps),
        ("a method that is no token", line("G(T / HTTP/1.1"), 400, closes),
        ("endless method", vec![b'A'; 100], 400, closes),
        ("OPTIONS *", line("OPTIONS * HTTP/1.1"), 204, closes),
        ("GET *", line("GET * HTTP/1.1"), 400, closes),
        // Target
        ("absolute form", line("GET http://169.254.169.254/some HTTP/1.1"), 200, keeps),
        ("slashes", line("GET //some// HTTP/1.1"), 200, keeps),
        ("query", line("GET /some?x HTTP/1.1"), 200, keeps),
        ("byte outside 0x21-0x7E", b"GET /\xc3\xa4 HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), 400, closes),
        ("space in target", line("GET /a b HTTP/1.1"), 400, closes),
        ("dot segment", line("GET /a/../b HTTP/1.1"), 400, closes),
        ("encoded slash", line("GET /a%2fb HTTP/1.1"), 400, closes),
        ("no UTF-8", line("GET /%ff HTTP/1.1"), 404, keeps),
        ("longest target", target(TARGET_MAX), 404, keeps),
        ("target too long", target(TARGET_MAX + 1), 414, closes),
        // Fields
        ("8 KiB of fields", with_fields(FIELDS_MAX), 404, keeps),
        ("more than 8 KiB of fields", with_fields(FIELDS_MAX + 1), 431, closes),
        ("most fields", many(FIELD_COUNT_MAX), 200, keeps),
        ("one field too many", many(FIELD_COUNT_MAX + 1), 431, closes),
        ("folded field", get("A: b\r\n c\r\n"), 400, closes),
        ("space before colon", get("A : b\r\n"), 400, closes),
        ("no colon", get("A\r\n"), 400, closes),
        ("NUL in a value", get("A: \0\r\n"), 400, closes),
        ("bare CR", get("A: b\rC: d\r\n"), 400, closes),
        ("bare LF", b"GET /some HTTP/1.1\nHost: x\n\n".to_vec(), 200, keeps),
        ("empty lines first", line("\r\n\r\nGET /some HTTP/1.1"), 200, keeps),
        ("too many empty lines first", line("\r\n\r\n\r\n\r\n\r\nGET /some HTTP/1.1"), 400, closes),
        ("Connection: close", get("Connection: x, Close\r\n"), 200, closes),
        // Body
        ("largest body", put("Content-Length: 65536\r\n", &large), 200, keeps),
        ("one byte more", put("Content-Length: 65537\r\n", b""), 413, closes),
        ("a length beyond 64 bits", put("Content-Length: 99999999999999999999999\r\n", b""), 413, closes),
        ("a length that is no number", put("Content-Length: +5\r\n", b"hello"), 400, closes),
        ("empty length", put("Content-Length: \r\n", b""), 400, closes),
        ("lengths that agree", put("Content-Length: 2\r\nContent-Length: 2\r\n", b"ok"), 200, keeps),
        ("lengths that differ", put("Content-Length: 2\r\nContent-Length: 3\r\n", b"ok"), 400, closes),
        ("a list of lengths", put("Content-Length: 2, 2\r\n", b"ok"), 400, closes),
        ("both framings", put("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"ok"), 400, closes),
        ("chunked", put("Transfer-Encoding: chunked\r\n", b"2\r\nok\r\n0\r\n\r\n"), 200, keeps),
        ("another coding", put("Transfer-Encoding: gzip, chunked\r\n", b""), 501, closes),
        (
            "coding twice",
            put("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", b""),
            400,
            closes,
        ),
        ("chunk without size", put("Transfer-Encoding: chunked\r\n", b"\r\n"), 400, closes),
        ("chunk size too long", put("Transfer-Encoding: chunked\r\n", b"000000001\r\n"), 400, closes),
        ("chunk too long", put("Transfer-Encoding: chunked\r\n", b"3\r\nabcd\r\n"), 400, closes),
        ("largest body in chunks", chunks(65_000, 536), 200, keeps),
        ("one byte too many in the second chunk", chunks(65_000, 537), 413, closes),
        ("chunks beyond the limit", put("Transfer-Encoding: chunked\r\n", b"10001\r\n"), 413, closes),
        (
            "endless trailer",
            put("Transfer-Encoding: chunked\r\n", &[b"0\r\n", &large[..3000]].concat()),
            400,
            closes,
        ),
        ("chunked in HTTP/1.0", line("PUT /echo HTTP/1.0\r\nTransfer-Encoding: chunked"), 400, closes),
        ("another expectation", put("Expect: tea\r\nContent-Length: 2\r\n", b"ok"), 417, closes),
        // Response
        ("the answer closes", line("GET /close HTTP/1.1"), 200, closes),
        // iPXE waits for the body of a 204 until the connection ends.
        ("a 204 closes", line("GET /none HTTP/1.1"), 204, closes),
        ("HEAD for a 204", line("HEAD /none HTTP/1.1"), 204, closes),
        ("a 204 to HTTP/1.0", line("GET /none HTTP/1.0\r\nConnection: keep-alive"), 204, closes),
    ];
    for (name, request, status, closed) in cases {
        let (answers, ended) = ask(&request);
        let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
        assert_eq!((statuses, ended), (vec![status], closed), "{name}: {answers:?}");
        for answer in &answers {
            let says_close = answer.head.contains("\r\nConnection: close\r\n");
            assert_eq!(says_close, closed, "{name}: {}", answer.head);
        }
    }
}

#[test]
fn an_http_1_0_connection_is_kept_when_asked_and_the_answer_says_so() {
    let (answers, ended) = ask(b"GET /bytes/3 HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n");
    assert!(answers[0].head.contains("\r\nConnection: keep-alive\r\n") && !ended, "{answers:?}");
}

#[test]
fn a_response_carries_date_and_length_and_nothing_forbidden() {
    let (answers, _) =
        ask(b"GET /bytes/3 HTTP/1.1\r\nHost: x\r\nRange: bytes=0-0\r\nAccept-Encoding: gzip\r\n\r\n");
    assert_eq!(
        answers[0].head,
        "HTTP/1.1 200 OK\r\nServer: metadata\r\nCache-Control: no-store\r\nAccept-Ranges: none\r\n\
         Content-Type: application/octet-stream\r\nContent-Length: 3\r\nDate: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
    );
}

#[test]
fn head_is_get_without_the_body() {
    for path in ["/bytes/5000", "/none", "/nowhere"] {
        let (get, _) = ask(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        let (head, _) = ask(format!("HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        assert_eq!((&head[0].head, head[0].body.len()), (&get[0].head, 0), "{path}");
    }
    let (twice, _) =
        ask(b"HEAD /bytes/5 HTTP/1.1\r\nHost: x\r\n\r\nGET /bytes/2 HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(twice[1].body.len(), 2, "the HEAD answer has no body");
}

#[test]
fn a_head_that_is_refused_gets_no_body_either() {
    let long = format!("HEAD /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(TARGET_MAX));
    let large = format!("HEAD / HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", 64 * 1024 + 1);
    let chunks = "HEAD / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nx";
    for (write, request, status) in [
        (usize::MAX, "HEAD /.. HTTP/1.1\r\nHost: x\r\n\r\n", "400"),
        (usize::MAX, "\r\nHEAD /%zz HTTP/1.1\r\nHost: x\r\n\r\n", "400"),
        (7, "HEAD / HTTP/1.1\r\nHost: x\r\nA\r\n\r\n", "400"),
        (700, &long, "414"),
        (usize::MAX, &large, "413"),
        (usize::MAX, chunks, "400"),
        (usize::MAX, "HEAD / HTTP/1.1\r\nHost: x\r\nA", "408"),
    ] {
        let (stack, _) = stack(StackConfig::default());
        let client = Client::new(3, Habits { write, ..Habits::default() });
        let mut world = World::new(stack, client, Faults::NONE, 0);
        let talk = world.client.begin(40_000, request.as_bytes());
        world.wait(Duration::from_secs(11));
        let received = String::from_utf8_lossy(&world.client.talks[talk].received);
        assert!(received.starts_with(&format!("HTTP/1.1 {status} ")), "{request:.40}: {received}");
        assert!(received.ends_with("\r\n\r\n"), "{request:.40} has a body: {received}");
    }
}

#[test]
fn a_204_has_no_length() {
    let (answers, _) = ask(b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(!answers[0].head.contains("Content-Length"), "{}", answers[0].head);
}

#[test]
fn a_405_and_options_list_the_allowed_methods() {
    let all = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT";
    for (request, allowed) in [("BREW / HTTP/1.1", "GET, HEAD"), ("OPTIONS * HTTP/1.1", all)] {
        let (answers, _) = ask(&line(request));
        assert_eq!(answers[0].field("Allow"), Some(allowed), "{request}");
    }
}

#[test]
fn error_bodies_are_short_text() {
    let (answers, _) = ask(&line("GET /.. HTTP/1.1"));
    assert_eq!(answers[0].body, b"Bad Request\n");
    assert!(answers[0].head.contains("\r\nContent-Type: text/plain; charset=utf-8\r\n"));
}

#[test]
fn bodies_arrive_unchanged_and_a_get_body_is_ignored() {
    let echo = |request: &[u8]| String::from_utf8_lossy(&ask(request).0[0].body).into_owned();
    assert_eq!(echo(&put("Content-Length: 5\r\n", b"hello")), "Put\n/echo\n\nhello");
    let chunks = b"3;a=b\r\nhel\r\n2\r\nlo\r\n0\r\nT: v\r\n\r\n";
    assert_eq!(echo(&put("Transfer-Encoding: Chunked\r\n", chunks)), "Put\n/echo\n\nhello");
    assert_eq!(
        echo(b"GET /echo?q=%20 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"),
        "Get\n/echo\nq=%20\n"
    );
    let (answers, _) =
        ask(b"GET /some HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nGET GET /bytes/1 HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(answers.len(), 2, "{answers:?}");
}

#[test]
fn a_client_that_expects_100_continue_gets_it() {
    let (mut world, _) = world();
    let head = b"PUT /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n";
    let talk = world.client.begin(40_000, head);
    world.wait(SOON);
    assert_eq!(world.client.talks[talk].received, b"HTTP/1.1 100 Continue\r\n\r\n");
    world.client.transmit(talk, b"ok");
    world.wait(SOON);
    let statuses: Vec<u16> =
        responses(&world.client.talks[talk].received, &[]).iter().map(|a| a.status).collect();
    assert_eq!(statuses, [100, 200]);
}

#[test]
fn a_client_whose_body_is_too_large_gets_the_answer_while_it_still_sends() {
    let (answers, ended) = ask(&put("Content-Length: 200000\r\n", &vec![b'x'; 200_000]));
    assert_eq!((answers[0].status, ended), (413, true));
}

#[test]
fn a_head_that_does_not_end_in_time_is_answered_408() {
    let (mut world, _) = world();
    let talk = world.client.begin(40_000, b"GET / HT");
    world.wait(Duration::from_millis(9_900));
    assert!(world.client.talks[talk].received.is_empty());
    world.wait(Duration::from_millis(200));
    assert_eq!(responses(&world.client.talks[talk].received, &[])[0].status, 408);
    assert!(world.client.talks[talk].ended);
}

#[test]
fn a_trickling_head_is_answered_408() {
    let (mut world, _) = world();
    let talk = world.client.begin(40_000, b"");
    for _ in 0..11 {
        world.client.transmit(talk, b"G");
        world.wait(SOON);
    }
    assert_eq!(responses(&world.client.talks[talk].received, &[])[0].status, 408);
}

#[test]
fn a_body_that_does_not_end_in_time_is_answered_408() {
    let (mut world, _) = world();
    let talk = world.client.begin(40_000, &put("Content-Length: 2\r\n", b"o"));
    world.wait(Duration::from_secs(31));
    assert_eq!(responses(&world.client.talks[talk].received, &[])[0].status, 408);
}

#[test]
fn an_idle_connection_is_closed_after_75_seconds() {
    let (mut world, _) = world();
    let talk = world.client.begin(40_000, b"GET /some HTTP/1.1\r\nHost: x\r\n\r\n");
    world.wait(Duration::from_millis(74_500));
    assert!(!world.client.talks[talk].ended);
    world.wait(SOON);
    assert!(world.client.talks[talk].ended);
    assert_eq!(responses(&world.client.talks[talk].received, &[]).len(), 1);
}

#[test]
fn an_unused_connection_is_not_held_and_its_late_request_is_served() {
    let (mut world, _) = world();
    let talk = world.client.begin(40_000, b"");
    world.wait(Duration::from_secs(100));
    assert_eq!((world.stack.stats().handshakes, world.stack.stats().connections), (1, 0));
    world.client.transmit(talk, b"GET /some HTTP/1.1\r\nHost: x\r\n\r\n");
    world.wait(SOON);
    assert_eq!(responses(&world.client.talks[talk].received, &[])[0].status, 200);
}

#[test]
fn a_request_cut_off_by_the_end_of_the_connection_is_answered_400() {
    for request in [
        &b"GET / HTTP/1.1\r\nHost: x\r\nA"[..],
        b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe",
    ] {
        let (mut world, _) = world();
        let talk = world.client.begin(40_000, request);
        world.client.close(talk);
        world.wait(SOON);
        assert_eq!(responses(&world.client.talks[talk].received, &[])[0].status, 400);
    }
}

#[test]
fn a_request_waits_for_its_record_as_long_as_its_client_would() {
    for (path, patience) in [
        ("/metadata/v1.json", 1500),
        ("/hetzner/v1/metadata", 1500),
        ("/openstack", 8000),
        ("/latest/meta-data", 4000),
    ] {
        let (mut world, pattern) = world();
        pattern.ready.store(false, Ordering::Relaxed);
        let talk = world.client.begin(40_000, format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        world.wait(Duration::from_millis(patience - 100));
        assert!(world.client.talks[talk].received.is_empty(), "{path}");
        world.wait(Duration::from_millis(200));
        let answers = responses(&world.client.talks[talk].received, &[]);
        assert_eq!(answers[0].status, 503, "{path}");
        assert!(answers[0].head.contains("\r\nRetry-After: 1\r\n"), "{path}");
        assert!(!world.client.talks[talk].ended, "{path}: the retry uses the same connection");
    }
}

#[test]
fn a_put_for_an_expected_vm_ends_without_an_answer() {
    let (mut world, pattern) = world();
    pattern.ready.store(false, Ordering::Relaxed);
    let talk =
        world.client.begin(40_000, b"PUT /latest/api/token HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
    world.wait(PUT_HOLD - SOON);
    assert!(!world.client.talks[talk].ended);
    world.wait(2 * SOON);
    assert!(world.client.talks[talk].ended && world.client.talks[talk].received.is_empty());
}

#[test]
fn a_waiting_request_is_answered_when_its_record_arrives() {
    let (mut world, pattern) = world();
    pattern.ready.store(false, Ordering::Relaxed);
    let ask = [put("Content-Length: 5\r\n", b"hello"), line("GET /bytes/1 HTTP/1.1")].concat();
    let talk = world.client.begin(40_000, &ask);
    world.wait(SOON);
    assert!(world.client.talks[talk].received.is_empty());
    pattern.ready.store(true, Ordering::Relaxed);
    world.wait(Duration::from_millis(60));
    let answers = responses(&world.client.talks[talk].received, &[]);
    assert_eq!((answers[0].body.as_slice(), answers.len()), (&b"Put\n/echo\n\nhello"[..], 2));
}

#[test]
fn an_unknown_slot_is_answered_404_at_once() {
    let (mut world, pattern) = world();
    pattern.known.store(false, Ordering::Relaxed);
    let talk = world.client.begin(40_000, b"GET /openstack HTTP/1.1\r\nHost: x\r\n\r\n");
    world.wait(Duration::from_millis(10));
    assert_eq!(responses(&world.client.talks[talk].received, &[])[0].status, 404);
}

#[test]
fn every_path_follows_the_vm_from_expected_to_served_to_removed() {
    let content = Arc::new(OnDemand::new(Store::new(1)));
    let stack = Stack::new(StackConfig::default(), MetadataService::new(Arc::clone(&content)));
    let mut world = World::new(stack, Client::new(0, Habits::default()), Faults::NONE, 0);
    let (record, _) = Record::parse("r.yaml", &Identity::of(0).record(1)).expect("a good record");
    let vm = VmState::alone(record.vm.uuid.as_str());
    let responses_of = dialect::render(&record, &mut Interner::new(), vm);
    let paths = ["/", "/healthz", "/v1/meta-data", "/v1/user-data"];
    let states: [(&dyn Fn(), u16); 3] = [
        (&|| content.store().expect(0).expect("there is slot 0"), 503),
        (&|| content.store().publish(0, Arc::new(responses_of.clone())).expect("there is slot 0"), 200),
        (&|| content.store().withdraw(0).expect("there is slot 0"), 404),
    ];
    let talk = world.client.begin(40_000, b"");
    let mut wanted = Vec::new();
    for (enter, status) in states {
        enter();
        for path in paths {
            world.client.transmit(talk, &line(&format!("GET {path} HTTP/1.1")));
            world.wait(Duration::from_secs(5));
            wanted.push(status);
            let answers = responses(&world.client.talks[talk].received, &[]);
            let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
            assert_eq!(statuses, wanted, "{path}");
        }
    }
}

/// A guest whose VM has this limit and one path.
fn limited(limit: RequestLimit) -> World<MetadataService> {
    let content = Arc::new(OnDemand::new(Store::new(1)));
    let mut limited = Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
    limited.limit(limit);
    let answer = Endpoint::Fixed(Response::new(StatusCode(200), None, &[], "x"));
    limited.add(Host::Metadata, "/", Route::new("test", answer));
    content.store().publish(0, Arc::new(limited.build())).expect("there is slot 0");
    let stack = Stack::new(StackConfig::default(), MetadataService::new(content));
    World::new(stack, Client::new(0, Habits::default()), Faults::NONE, 0)
}

fn bare_put(path: &str) -> Vec<u8> {
    format!("PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").into_bytes()
}

#[test]
fn of_all_requests_only_those_for_tokens_do_not_count_against_the_rate() {
    let mut world = limited(RequestLimit { per_second: 1, burst: 1 });
    let first = world.client.begin(40_000, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    world.wait(Duration::from_millis(10));
    assert_eq!(responses(&world.client.talks[first].received, &[])[0].status, 200);
    for (port, path, is_answered) in [
        (50_000, "/latest/api/token", true),
        (50_001, "/ec2/latest/api/token", true),
        (50_002, "/v1/token", true),
        (50_003, "/", false),
        (50_004, "/api/token", false),
        (50_005, "/computeMetadata/v1/instance/guest-attributes/a/b", false),
    ] {
        let talk = world.client.begin(port, &bare_put(path));
        world.wait(Duration::from_millis(10));
        assert_eq!(!world.client.talks[talk].received.is_empty(), is_answered, "PUT {path}");
    }
}

#[test]
fn a_vm_above_its_rate_waits_its_turn_and_gets_429_if_it_waits_too_long() {
    const ASKED: u16 = 10;
    let mut world = limited(RequestLimit { per_second: 1, burst: 2 });
    let talks: Vec<_> =
        (0..ASKED).map(|n| world.client.begin(40_000 + n, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).collect();
    world.wait(Duration::from_secs(3));
    let early = talks.iter().filter(|talk| !world.client.talks[**talk].received.is_empty()).count();
    assert!((4..=5).contains(&early), "two at once and then one per second, not {early}");
    let put = world.client.begin(50_000, &bare_put("/latest/api/token"));
    world.wait(Duration::from_millis(10));
    assert_eq!(responses(&world.client.talks[put].received, &[])[0].status, 405, "a token never waits");
    world.wait(Duration::from_secs(2));
    let mut refused = 0;
    for talk in talks {
        let answers = responses(&world.client.talks[talk].received, &[]);
        match answers[0].status {
            200 => {}
            429 => {
                refused += 1;
                assert!(answers[0].head.contains("\r\nRetry-After: 1\r\n"));
            }
            other => panic!("status {other}"),
        }
    }
    assert!(
        (4..=5).contains(&refused),
        "of ten requests, five or six are served, so {refused} refusals are wrong"
    );
}
