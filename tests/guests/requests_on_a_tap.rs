//! The kernel answers a request that workers have answered for two other VMs, and answers it as they do.

use anyhow::{Result, ensure};
use metadata_steer::probe::{Feature, features};
use serde_json::{Value, json};
use std::net::IpAddr;
use std::thread;
use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::answers::{self, PATHS};
use support::bpffs::Bpffs;
use support::eventually;
use support::guest::METADATA;
use support::host::Host;
use support::netns::Namespace;
use support::raw::Segment;
use support::record::{Identity, replace};
use support::station::{Station, Talk, answer};
use support::tap::Shape;
use support::{agent, privileged};

const PATIENCE: Duration = Duration::from_secs(20);
const TO: (IpAddr, u16) = (IpAddr::V4(METADATA), 80);
/// Two guests from which the agent learns, and a third.
const GUESTS: u16 = 3;
/// The number of the third guest.
const THIRD: usize = 2;

/// A node whose kernel may answer requests.
struct Node {
    host: Host,
    bpffs: Bpffs,
    records: tempfile::TempDir,
    identities: Vec<Identity>,
    stations: Vec<Station>,
    /// The agent's namespace, if the taps are in another one.
    elsewhere: Option<Namespace>,
}

impl Node {
    /// A node with the taps in the agent's own namespace.
    fn new(shape: Shape) -> Self {
        let (host, records) = (Host::new().expect("a host"), tempfile::tempdir().expect("a directory"));
        let bpffs = Bpffs::mount().expect("a bpffs");
        let identities: Vec<_> = (0..GUESTS).map(Identity::of).collect();
        let station = |identity: &Identity| {
            identity.write(records.path(), 1).expect("a record");
            let tap = host.tap(identity, shape).expect("a tap");
            Station::new(tap, identity.mac, identity.address)
        };
        let stations = identities.iter().map(station).collect();
        Self { host, bpffs, records, identities, stations, elsewhere: None }
    }

    fn agent(&self, config: &str) -> Agent<'_> {
        self.agent_with(&format!("answer_requests_in_kernel: true\n{config}"), &[])
    }

    fn agent_with(&self, config: &str, more: &[&str]) -> Agent<'_> {
        let file = self.records.path().join("agent.conf");
        std::fs::write(&file, config).expect("a file");
        let named = |identity: &Identity| {
            let port = PortArgument::new(Host::tap_name(identity), identity.mac);
            if self.elsewhere.is_some() { port.within(self.host.ns()) } else { port }
        };
        let ns = self.elsewhere.as_ref().unwrap_or(self.host.ns());
        let ports: Vec<_> = self.identities.iter().map(named).collect();
        let mut words = agent::arguments_with_pins(self.records.path(), &ports, &self.bpffs.pins());
        words.extend(["--config".into(), file.into()]);
        words.extend(more.iter().map(Into::into));
        Agent::start_binary(&agent::binary().expect("it is built"), ns, words).expect("an agent")
    }

    /// Replaces a record by one with a change.
    fn write(&self, number: usize, change: impl FnOnce(&mut Value)) {
        let identity = &self.identities[number];
        let mut record: Value = serde_json::from_str(&identity.record(2)).expect("JSON");
        change(&mut record);
        replace(&identity.path(self.records.path()), &record.to_string()).expect("a record");
    }
}

/// A request as most clients send it. The connection stays open.
fn request(path: &str) -> Vec<u8> {
    request_with("GET", path, "")
}

/// A request with more header fields.
fn request_with(method: &str, path: &str, more: &str) -> Vec<u8> {
    let fields =
        "Host: 169.254.169.254\r\nUser-Agent: Cloud-Init/25.1\r\nAccept: */*\r\nConnection: keep-alive";
    format!("{method} {path} HTTP/1.1\r\n{fields}\r\n{more}\r\n").into_bytes()
}

/// The whole answer at the start of these bytes; `None` while it is incomplete.
fn complete(received: &[u8]) -> Option<(u16, Vec<u8>)> {
    let (status, content) = answer(received).ok()?;
    let head = String::from_utf8_lossy(received);
    let length: usize = head.lines().find_map(|line| line.strip_prefix("Content-Length: "))?.parse().ok()?;
    (content.len() >= length).then_some((status, content))
}

/// Sends one more request on an open connection.
fn ask_again(station: &mut Station, talk: &mut Talk, path: &str) -> Result<(u16, Vec<u8>)> {
    exchange(station, talk, &request(path))
}

fn exchange(station: &mut Station, talk: &mut Talk, request: &[u8]) -> Result<(u16, Vec<u8>)> {
    talk.received.clear();
    let said = talk.transmit(request);
    station.until(talk, &said, |talk| complete(&talk.received).is_some())?;
    let answer = complete(&talk.received);
    Ok(answer.expect("it is complete"))
}

/// Sends one request on a new connection, and closes it.
fn ask(station: &mut Station, path: &str) -> Result<(u16, Vec<u8>)> {
    send(station, &request(path))
}

fn send(station: &mut Station, request: &[u8]) -> Result<(u16, Vec<u8>)> {
    let mut talk = station.open(TO)?;
    let answer = exchange(station, &mut talk, request)?;
    let fin = talk.finish();
    station.until(&mut talk, &[fin], |talk| talk.ended)?;
    Ok(answer)
}

fn by_kernel(agent: &Agent<'_>) -> u64 {
    agent.metrics().and_then(|metrics| metrics.frames("answer_request")).expect("a counter")
}

/// Asks until the kernel answers.
fn until_the_kernel_answers(agent: &Agent<'_>, station: &mut Station, path: &str) -> (u16, Vec<u8>) {
    let answer = eventually(PATIENCE, || {
        let before = by_kernel(agent);
        let answer = ask(station, path)?;
        ensure!(by_kernel(agent) > before, "a worker has answered {path}");
        Ok(answer)
    });
    answer.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()))
}

/// A node, an agent that has learned what guests ask, and the third guest, which the kernel answers.
fn taught(config: &str, shape: Shape, test: impl FnOnce(&Node, &Agent<'_>, &mut Station)) {
    if !privileged::or_skip() {
        return;
    }
    taught_on(Node::new(shape), config, test);
}

fn taught_on(mut node: Node, config: &str, test: impl FnOnce(&Node, &Agent<'_>, &mut Station)) {
    let mut third = node.stations.pop().expect("three stations");
    let mut first: Vec<_> = node.stations.drain(..).collect();
    let agent = node.agent(config);
    for station in &mut first {
        for path in PATHS {
            ask(station, path).expect("an answer");
        }
    }
    until_the_kernel_answers(&agent, &mut third, PATHS[0]);
    test(&node, &agent, &mut third);
}

#[test]
fn the_kernel_answers_a_third_vm_from_its_own_record() {
    for shape in [Shape::default(), Shape::virtio(), Shape { queues: 2, vnet_hdr: true }] {
        taught("", shape, |node, agent, station| {
            for path in PATHS {
                let (status, content) = until_the_kernel_answers(agent, station, path);
                answers::check(&node.identities[THIRD], path, status, &content).expect("its own record");
            }
            let before = by_kernel(agent);
            let (status, _) = ask(station, "/v1/nothing").expect("an answer");
            assert_eq!((status, by_kernel(agent)), (404, before), "nobody else has asked for it");
        });
    }
}

#[privileged::test]
fn the_kernel_answers_on_a_tap_in_another_namespace() {
    for shape in [Shape::default(), Shape::virtio()] {
        let elsewhere = Some(Namespace::new("agent").expect("a namespace"));
        let node = Node { elsewhere, ..Node::new(shape) };
        taught_on(node, "", |node, agent, station| {
            for path in PATHS {
                let (status, content) = until_the_kernel_answers(agent, station, path);
                answers::check(&node.identities[THIRD], path, status, &content).expect("its own record");
            }
            let text = user_data(LONG_DOCUMENTS[0]);
            serve_third(node, station, &text);
            until_the_kernel_answers(agent, station, PATHS[0]);
            let before = by_kernel(agent);
            assert_eq!(ask(station, PATHS[1]).expect("an answer").1, text.as_bytes());
            assert_eq!(by_kernel(agent), before, "no classifier reaches the tap, so a worker answers");
        });
    }
}

#[privileged::test]
fn two_vms_that_send_many_requests_leave_room_for_what_others_send() {
    let mut node = Node::new(Shape::default());
    let mut stations = std::mem::take(&mut node.stations);
    let agent = node.agent("");
    for station in &mut stations[..THIRD] {
        let mut talk = station.open(TO).expect("a connection");
        // More than are learned, and fewer than a VM may send at once.
        for number in 0..300 {
            ask_again(station, &mut talk, &format!("/v1/nothing-{number}")).expect("an answer");
        }
    }
    until_the_kernel_answers(&agent, &mut stations[1], "/v1/nothing-0");
    let [first, _, third] = &mut stations[..] else { panic!("three stations") };
    ask(first, PATHS[1]).expect("an answer");
    let (status, content) = until_the_kernel_answers(&agent, third, PATHS[1]);
    answers::check(&node.identities[THIRD], PATHS[1], status, &content).expect("its own record");
}

#[privileged::test]
fn without_the_setting_workers_answer_every_request() {
    let mut node = Node::new(Shape::default());
    let mut stations = std::mem::take(&mut node.stations);
    let agent = node.agent("answer_in_kernel: false\n");
    for station in &mut stations {
        ask(station, PATHS[0]).expect("an answer");
    }
    assert_eq!(by_kernel(&agent), 0);
}

#[test]
fn a_changed_record_is_served_at_once_and_then_by_the_kernel() {
    taught("", Shape::default(), |node, agent, station| {
        for round in 0..5 {
            let text = format!("#cloud-config\n# round {round}\n");
            node.write(THIRD, |record| record["user_data"] = json!({ "text": text }));
            let is_new = |content: &[u8]| content == text.as_bytes();
            eventually(PATIENCE, || {
                let (_, content) = ask(station, PATHS[1])?;
                ensure!(is_new(&content), "the former record");
                Ok(())
            })
            .expect("the new record");
            let (_, content) = until_the_kernel_answers(agent, station, PATHS[1]);
            assert!(is_new(&content), "a former record comes back");
        }
    });
}

/// The bytes of a document that go into one segment with its head, and of one that does not.
const LONG_DOCUMENTS: [usize; 3] = [600, 1_000, 1_250];
const TOO_LONG_DOCUMENT: usize = 1_460;

/// True if the kernel can lengthen an answer in a socket buffer.
fn has_tcx() -> bool {
    features().contains(&(Feature::Tcx, Ok(true)))
}

/// User-data whose answer has no room in the frame of its request, if the kernel can send it.
fn long_user_data() -> String {
    user_data(if has_tcx() { LONG_DOCUMENTS[1] } else { 100 })
}

fn user_data(length: usize) -> String {
    let lines = (0..).map(|line| format!("# line {line}\n"));
    let mut text = lines.take(length / 8).fold("#cloud-config\n".to_string(), |text, line| text + &line);
    text.truncate(length);
    text
}

/// Gives the third VM other user-data, and asks until that is served.
fn serve_third(node: &Node, station: &mut Station, text: &str) {
    node.write(THIRD, |record| record["user_data"] = json!({ "text": text }));
    eventually(PATIENCE, || {
        ensure!(ask(station, PATHS[1])?.1 == text.as_bytes(), "the former record");
        Ok(())
    })
    .expect("the new record");
}

#[test]
fn the_kernel_gives_answers_of_one_segment_whatever_room_their_request_leaves() {
    if !has_tcx() {
        return privileged::not_available("the kernel has no tcx classifiers (Linux 6.6)");
    }
    for shape in [Shape::default(), Shape::virtio(), Shape { queues: 2, vnet_hdr: true }] {
        taught("", shape, |node, agent, station| {
            for length in LONG_DOCUMENTS {
                let text = user_data(length);
                serve_third(node, station, &text);
                let (_, content) = until_the_kernel_answers(agent, station, PATHS[1]);
                assert_eq!(String::from_utf8_lossy(&content), text);
            }
            if shape.vnet_hdr {
                // A worker would send both segments in one frame, which the station does not read.
                return;
            }
            serve_third(node, station, &user_data(TOO_LONG_DOCUMENT));
            until_the_kernel_answers(agent, station, PATHS[0]);
            let before = by_kernel(agent);
            ask(station, PATHS[1]).expect("an answer");
            assert_eq!(by_kernel(agent), before, "it takes two segments");
        });
    }
}

/// Documents in the kernel's table.
fn published(agent: &Agent<'_>, what: &str) -> u64 {
    let (metrics, name) = (agent.metrics().expect("metrics"), format!("xdp_imds_published_{what}"));
    let gauge = metrics.samples().iter().find(|sample| sample.name == name);
    gauge.expect("a gauge").value as u64
}

#[privileged::test]
fn vms_that_answer_alike_share_a_document_until_one_of_them_differs() {
    const ALIKE: &str = "#cloud-config\n# for all\n";
    let mut node = Node::new(Shape::default());
    let serve = |node: &Node, number, text| {
        node.write(number, |record| record["user_data"] = json!({ "text": text }))
    };
    (0..usize::from(GUESTS)).for_each(|number| serve(&node, number, ALIKE));
    let mut stations = std::mem::take(&mut node.stations);
    let agent = node.agent("");
    for station in &mut stations {
        ask(station, PATHS[1]).expect("an answer");
    }
    for (text, expected) in [(ALIKE, 2), ("#cloud-config\n# for the third\n", 3), (ALIKE, 2)] {
        serve(&node, THIRD, text);
        eventually(PATIENCE, || {
            let (_, content) = ask(&mut stations[THIRD], PATHS[1])?;
            ensure!(content == text.as_bytes(), "the former record");
            Ok(())
        })
        .expect("the new record");
        for (number, station) in stations.iter_mut().enumerate() {
            let own = if number == THIRD { text } else { ALIKE };
            for _ in 0..2 {
                let (_, content) = until_the_kernel_answers(&agent, station, PATHS[1]);
                assert_eq!(String::from_utf8_lossy(&content), own, "VM {number}");
            }
        }
        // The first VM's own document, the common one, and the third VM's own one.
        eventually(PATIENCE, || {
            let documents = published(&agent, "documents");
            ensure!(documents == expected, "{documents} documents, not {expected}");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error:#}"));
    }
}

/// Sends a request on a new connection. Returns the connection, the segment and the payload of the answer, which is not
/// acknowledged.
fn unacknowledged(station: &mut Station) -> (Talk, Segment, Vec<u8>) {
    let mut talk = station.open(TO).expect("a connection");
    let said = talk.transmit(&request(PATHS[1])).remove(0);
    let answer = repeat(station, &mut talk, &said).expect("an answer");
    (talk, said, answer)
}

/// Sends a segment, and returns the payload of the answer.
fn repeat(station: &mut Station, talk: &mut Talk, said: &Segment) -> Result<Vec<u8>> {
    station.drain()?;
    station.transmit(said)?;
    eventually(PATIENCE, || {
        let replies = station.segments()?;
        let reply = replies.iter().find(|reply| talk.is_theirs(reply) && !reply.payload.is_empty());
        talk.reset |= replies.iter().any(|reply| talk.is_theirs(reply) && reply.flags.3);
        ensure!(reply.is_some() || talk.reset, "no answer");
        Ok(reply.map(|reply| reply.payload.clone()).unwrap_or_default())
    })
}

#[test]
fn a_repeated_request_gets_the_same_answer_and_after_a_change_a_reset() {
    taught("", Shape::default(), |node, agent, station| {
        serve_third(node, station, &long_user_data());
        until_the_kernel_answers(agent, station, PATHS[1]);
        let before = by_kernel(agent);
        let (mut talk, said, first) = unacknowledged(station);
        let content = |answer: &[u8]| complete(answer).expect("a whole answer").1;
        for _ in 0..3 {
            let again = repeat(station, &mut talk, &said).expect("the answer again");
            assert_eq!(content(&again), content(&first));
        }
        assert_eq!(by_kernel(agent), before + 4);
        // Another connection shows when the change is in force. The new answer is longer than what the guest may have
        // received.
        serve_third(node, station, &user_data(LONG_DOCUMENTS[2]));
        let answer = repeat(station, &mut talk, &said).expect("a reset");
        assert!(talk.reset && answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
    });
}

#[test]
fn a_worker_takes_the_connection_over_for_what_the_kernel_cannot_answer() {
    taught("", Shape::default(), |node, agent, station| {
        let own = &node.identities[THIRD];
        until_the_kernel_answers(agent, station, PATHS[1]);
        let mut talk = station.open(TO).expect("a connection");
        for round in 0..3 {
            let before = by_kernel(agent);
            let (status, content) = ask_again(station, &mut talk, PATHS[0]).expect("an answer");
            answers::check(own, PATHS[0], status, &content).expect("its own");
            let expected = if round == 0 { before + 1 } else { before };
            assert_eq!(by_kernel(agent), expected, "round {round}");
            let (status, _) = ask_again(station, &mut talk, "/v1/nothing").expect("an answer");
            assert_eq!(status, 404);
        }
        let fin = talk.finish();
        station.until(&mut talk, &[fin], |talk| talk.ended).expect("an end");
    });
}

#[test]
fn a_connection_of_the_kernel_goes_on_at_the_next_agent() {
    for next in ["answer_requests_in_kernel: true\n", ""] {
        taught("", Shape::default(), |node, agent, station| {
            until_the_kernel_answers(agent, station, PATHS[1]);
            let mut talk = station.open(TO).expect("a connection");
            let before = by_kernel(agent);
            ask_again(station, &mut talk, PATHS[1]).expect("an answer");
            assert_eq!(by_kernel(agent), before + 1);
            let _next = node.agent_with(next, &["--takeover"]);
            for path in PATHS {
                let (status, content) = ask_again(station, &mut talk, path).expect("an answer");
                answers::check(&node.identities[THIRD], path, status, &content).expect("its own");
            }
        });
    }
}

/// A configuration that lets the kernel answer for ten minutes after the agent was killed.
const LONG: &str = "answer_without_agent_seconds: 600\n";

#[test]
fn published_answers_outlive_a_killed_agent_and_the_next_one_serves_none_of_them() {
    for text in [user_data(100), long_user_data()] {
        published_answers_outlive_a_killed_agent(&text);
    }
}

fn published_answers_outlive_a_killed_agent(text: &str) {
    with_an_agent_to_end(|node, agent, third| {
        serve_third(node, third, text);
        let before = until_the_kernel_answers(&agent, third, PATHS[1]);
        agent.kill().expect("it is killed");
        assert_eq!(ask(third, PATHS[1]).expect("an answer by the kernel"), before);
        let text = new_user_data(node);
        assert_eq!(
            ask(third, PATHS[1]).expect("an answer by the kernel"),
            before,
            "nobody has read the record"
        );
        let next = node.agent(LONG);
        for round in 0..3 {
            let (_, content) = ask(third, PATHS[1]).expect("an answer");
            assert_eq!(content, text.as_bytes(), "round {round}\n{}", next.log());
        }
    });
}

#[privileged::test]
fn the_answers_of_an_agent_that_followed_another_outlive_it_too() {
    for takes_over in [false, true] {
        let mut node = Node::new(Shape::default());
        let mut stations = std::mem::take(&mut node.stations);
        let former = node.agent(LONG);
        let next = if takes_over {
            let config = format!("answer_requests_in_kernel: true\n{LONG}");
            let next = node.agent_with(&config, &["--takeover"]);
            former.stop().expect("it stops");
            next
        } else {
            former.kill().expect("it is killed");
            node.agent(LONG)
        };
        let third = &mut stations.pop().expect("three stations");
        for station in &mut stations {
            ask(station, PATHS[1]).expect("an answer");
        }
        let before = until_the_kernel_answers(&next, third, PATHS[1]);
        next.kill().expect("it is killed");
        let answer = ask(third, PATHS[1]);
        assert_eq!(answer.expect("an answer by the kernel"), before, "after a takeover: {takes_over}");
    }
}

#[privileged::test]
fn the_next_agent_publishes_what_guests_of_the_former_one_have_asked() {
    let mut node = Node::new(Shape::default());
    let mut stations = std::mem::take(&mut node.stations);
    let agent = node.agent("");
    for path in PATHS {
        stations.iter_mut().for_each(|station| drop(ask(station, path).expect("an answer")));
        until_the_kernel_answers(&agent, &mut stations[THIRD], path);
    }
    agent.stop().expect("it stops");

    let agent = node.agent("");
    eventually(PATIENCE, || {
        let vms = published(&agent, "vms");
        ensure!(vms == u64::from(GUESTS), "{vms} VMs, and no guest has asked yet");
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    // An agent learns nothing from a single guest.
    for path in PATHS {
        until_the_kernel_answers(&agent, &mut stations[THIRD], path);
    }
}

/// Gets a session token of EC2.
fn session_token(station: &mut Station, seconds: u32) -> String {
    let lifetime = format!("X-aws-ec2-metadata-token-ttl-seconds: {seconds}\r\n");
    let (status, token) =
        send(station, &request_with("PUT", "/latest/api/token", &lifetime)).expect("a token");
    assert_eq!(status, 200);
    String::from_utf8(token).expect("base64")
}

/// A request for the instance's name, which needs a token.
fn request_by_token(token: &str) -> Vec<u8> {
    let field = format!("X-aws-ec2-metadata-token: {token}\r\n");
    request_with("GET", "/latest/meta-data/local-hostname", &field)
}

/// A node whose VMs need session tokens, and an agent that has learned a request with one. Runs a test with the third
/// guest, to whose request with a token the kernel gives this answer.
fn with_tokens(test: impl FnOnce(&Node, &Agent<'_>, &mut [Station], &(u16, Vec<u8>))) {
    let mut node = Node::new(Shape::default());
    for number in 0..usize::from(GUESTS) {
        node.write(number, |record| record["serve"] = json!({ "imdsv2": "required" }));
    }
    let mut stations = std::mem::take(&mut node.stations);
    let agent = node.agent("");
    let mut own = None;
    for station in &mut stations {
        let token = session_token(station, 60);
        own = Some(send(station, &request_by_token(&token)).expect("an answer"));
    }
    let own = own.expect("three stations");
    let answered = eventually(PATIENCE, || {
        let token = session_token(&mut stations[THIRD], 60);
        let before = by_kernel(&agent);
        let answer = send(&mut stations[THIRD], &request_by_token(&token))?;
        ensure!(by_kernel(&agent) > before, "a worker has answered");
        Ok(answer)
    });
    let answered = answered.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    assert_eq!(answered, own, "the kernel's answer is the worker's");
    test(&node, &agent, &mut stations, &own);
}

#[privileged::test]
fn a_request_with_a_session_token_is_answered_for_its_own_vm_only() {
    with_tokens(|_, agent, stations, own| {
        let others = session_token(&mut stations[0], 60);
        let token = session_token(&mut stations[THIRD], 60);
        let third = &mut stations[THIRD];
        let mut nearly = token.clone().into_bytes();
        nearly[30] ^= 1;
        let nearly = String::from_utf8(nearly).expect("ASCII");
        for (what, token) in [("another VM's", &others), ("a changed one", &nearly), ("none", &String::new())]
        {
            let before = by_kernel(agent);
            let (status, _) = send(third, &request_by_token(token)).expect("an answer");
            assert_eq!((status, by_kernel(agent) - before), (401, 0), "{what}");
        }
        let before = by_kernel(agent);
        assert_eq!(send(third, &request_by_token(&token)).expect("an answer"), *own);
        assert_eq!(by_kernel(agent) - before, 1, "the third guest's token is still valid");
    });
}

#[privileged::test]
fn a_session_token_that_has_expired_is_refused() {
    with_tokens(|_, _, stations, own| {
        let third = &mut stations[THIRD];
        let token = session_token(third, 2);
        assert_eq!(send(third, &request_by_token(&token)).expect("an answer"), *own);
        eventually(PATIENCE, || {
            let (status, _) = send(third, &request_by_token(&token))?;
            ensure!(status == 401, "{status}");
            Ok(())
        })
        .expect("it expires");
    });
}

#[privileged::test]
fn a_session_token_outlives_a_change_of_the_record_and_gets_the_new_answer() {
    with_tokens(|node, _, stations, own| {
        let third = &mut stations[THIRD];
        let token = session_token(third, 60);
        node.write(THIRD, |record| {
            record["serve"] = json!({ "imdsv2": "required" });
            record["hostname"] = json!({ "short": "another", "domain": "example.org" });
        });
        eventually(PATIENCE, || {
            let (status, content) = send(third, &request_by_token(&token))?;
            ensure!((status, &content) != (own.0, &own.1), "the former record");
            assert_eq!((status, &*content), (200, &b"another.example.org"[..]));
            Ok(())
        })
        .expect("the new record");
        for _ in 0..3 {
            let (_, content) = send(third, &request_by_token(&token)).expect("an answer");
            assert_eq!(content, b"another.example.org");
        }
    });
}

#[test]
fn an_agent_that_is_stopped_withdraws_its_answers() {
    with_an_agent_to_end(|node, agent, third| {
        until_the_kernel_answers(&agent, third, PATHS[1]);
        agent.stop().expect("it stops");
        let text = new_user_data(node);
        let answer = thread::scope(|scope| {
            // The request waits for the next agent.
            let asked = scope.spawn(|| ask(third, PATHS[1]));
            let _next = node.agent(LONG);
            asked.join().expect("no panic")
        });
        assert_eq!(answer.expect("an answer").1, text.as_bytes());
    });
}

/// Runs a test with a node, its agent, which is configured by [`LONG`] and has learned a request, and the third guest.
fn with_an_agent_to_end(test: impl FnOnce(&Node, Agent<'_>, &mut Station)) {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::new(Shape::default());
    let mut third = node.stations.pop().expect("three stations");
    let mut first: Vec<_> = node.stations.drain(..).collect();
    let agent = node.agent(LONG);
    for station in &mut first {
        ask(station, PATHS[1]).expect("an answer");
    }
    test(&node, agent, &mut third);
}

/// Changes the third guest's user-data in its record. Returns the new text.
fn new_user_data(node: &Node) -> &'static str {
    let text = "#cloud-config\n# written while no agent runs\n";
    node.write(THIRD, |record| record["user_data"] = json!({ "text": text }));
    text
}

#[test]
fn a_guest_that_begins_again_with_the_same_port_is_answered() {
    taught("", Shape::default(), |_, agent, station| {
        until_the_kernel_answers(agent, station, PATHS[1]);
        let (abandoned, ..) = unacknowledged(station);
        for _ in 0..3 {
            let mut talk = Talk::new(abandoned.local, TO);
            station.begin(&mut talk).expect("a connection");
            let (status, _) = ask_again(station, &mut talk, PATHS[1]).expect("an answer");
            assert_eq!(status, 200);
        }
    });
}

#[test]
fn the_kernel_keeps_to_the_rate_of_a_vm() {
    taught("", Shape::default(), |node, agent, station| {
        let text = "#cloud-config\n# of a record with a limit\n";
        node.write(THIRD, |record| {
            record["user_data"] = json!({ "text": text });
            record["serve"] = json!({ "limits": { "rps": 1, "burst": 20 } });
        });
        let until_it_is_new = || {
            let before = by_kernel(agent);
            let (_, content) = ask(station, PATHS[1])?;
            ensure!(
                content == text.as_bytes() && by_kernel(agent) > before,
                "the former record, or a worker"
            );
            Ok(())
        };
        eventually(PATIENCE, until_it_is_new).expect("the kernel answers from the new record");
        let before = by_kernel(agent);
        for _ in 0..40 {
            ask(station, PATHS[1]).expect("an answer, by the kernel or a worker");
        }
        let answered = by_kernel(agent) - before;
        assert!((1..=22).contains(&answered), "{answered} of 40, with 20 at once and 1 a second");
    });
}

#[test]
fn answers_of_the_kernel_are_audited_and_counted_by_dialect() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let config = format!("audit: {{to: {:?}, sample: 1}}\n", file.path());
    taught(&config, Shape::default(), |node, agent, station| {
        let (by_kernel, own) = (by_kernel(agent), node.identities[THIRD].mac.to_string());
        assert!(by_kernel > 0);
        let asked = 5;
        for _ in 0..asked {
            until_the_kernel_answers(agent, station, PATHS[0]);
        }
        eventually(PATIENCE, || {
            let text = std::fs::read_to_string(file.path())?;
            let lines = text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
            let owns = lines.iter().filter(|line| line["mac"] == own.as_str() && line["path"] == PATHS[0]);
            let lines: Vec<_> = owns.collect();
            ensure!(lines.len() > asked, "{} lines", lines.len());
            for line in lines {
                ensure!(
                    line["status"] == 200 && line["dialect"] == "nocloud" && line["method"] == "GET",
                    "{line}"
                );
                ensure!(line["vm"] == node.identities[THIRD].instance_id.as_str(), "{line}");
            }
            Ok(())
        })
        .expect("a line for each answer");
        eventually(PATIENCE, || {
            let metrics = agent.metrics()?;
            let counted = metrics.samples().iter().filter(|sample| sample.name == "xdp_imds_requests_total");
            let counted: f64 = counted.map(|sample| sample.value).sum();
            ensure!(counted >= (asked + 1 + 4) as f64, "{counted} answers");
            Ok(())
        })
        .expect("they are counted");
    });
}
