//! The feed backs off from a failing API server, lists at once after the server has lost its history, and reports when
//! the server last answered.

use std::sync::Arc;
use std::time::Duration;

use metadata_feed::contact::FailureStreak;
use metadata_feed::kubevirt::{self, WatchPacing};
use serde_json::json;
use support::apiserver::{ApiServer, Manner};
use support::pod::Kubelet;
use tokio::time::Instant;

use super::{Node, PATIENCE, at_once, keys, vmi};

/// Pace of the tests that count requests.
const QUICK: WatchPacing = WatchPacing {
    first: Duration::from_millis(20),
    longest: Duration::from_secs(1),
    ended: Duration::from_millis(20),
    relist: Duration::from_secs(600),
    watch: Duration::from_secs(60),
    short: Duration::from_secs(1),
};
/// How long requests are counted.
const COUNTED: Duration = Duration::from_secs(3);
/// Watches that an agent keeps open.
const WATCHES: u64 = 2;
/// Requests per watch without a pause before them: a list and a watch at the start, a list and a watch after the
/// history has expired, and a list after the relist interval.
const WITHOUT_PAUSE: u64 = 5;
/// Requests per watch after each pause: a list and a watch.
const AFTER_A_PAUSE: u64 = 2;

/// Upper bound on an agent's requests within `elapsed` if all fail and each pause is as short as it may be. A slow
/// machine sends fewer.
fn most_requests(pace: &WatchPacing, elapsed: Duration) -> u64 {
    let mut pauses = 0;
    let mut spent = Duration::ZERO;
    loop {
        spent += pace.pause(pauses + 1) / kubevirt::SPREAD;
        if spent > elapsed {
            return WATCHES * (WITHOUT_PAUSE + AFTER_A_PAUSE * u64::from(pauses));
        }
        pauses += 1;
    }
}

/// Counts requests until [`COUNTED`] has passed and checks the upper bound.
async fn assert_few_requests(server: &ApiServer, pace: &WatchPacing, since: (Instant, u64), what: &str) {
    let (begun, before) = since;
    tokio::time::sleep_until(begun + COUNTED).await;
    let requests = server.requests() - before;
    // Read the clock after the counter, so that the bound covers every counted request.
    let most = most_requests(pace, begun.elapsed());
    assert!(requests <= most, "{what}: {requests} requests within {:?}, {most} at most", begun.elapsed());
    assert!(requests >= WATCHES, "{what}: {requests} requests");
}

const FAILURES: [Manner; 7] = [
    Manner::Away,
    Manner::Breaking,
    Manner::Forbidding,
    Manner::Lacking,
    Manner::Expired,
    Manner::Gone,
    Manner::Brief,
];

#[tokio::test]
async fn an_agent_started_while_the_server_fails_backs_off() {
    let cases = FAILURES.map(|manner| async move {
        let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
        server.behave(manner);
        let since = (Instant::now(), server.requests());
        let mut node = Node::paced(&server, &kubelet, None, QUICK);
        assert_few_requests(&server, &QUICK, since, &format!("{manner:?}")).await;
        server.behave(Manner::Well);
        server.put(vmi(1));
        node.until("its recovery", |node| node.synced && node.keys() == keys([1])).await;
    });
    futures_util::future::join_all(cases).await;
}

#[tokio::test]
async fn an_agent_started_before_the_server_listens_backs_off() {
    let (mut server, kubelet) = (ApiServer::start_refusing().unwrap(), Kubelet::new().unwrap());
    let begun = Instant::now();
    let mut node = Node::paced(&server, &kubelet, None, QUICK);
    tokio::time::sleep_until(begun + COUNTED).await;
    // Only the agent can count connections that the kernel refuses.
    let refused = node.contact.report(std::time::Instant::now()).failures["unreachable"];
    let most = most_requests(&QUICK, begun.elapsed());
    assert!((WATCHES..=most).contains(&refused), "{refused} connections, {most} at most");
    server.listen().unwrap();
    server.put(vmi(1));
    node.until("its start", |node| node.synced && node.keys() == keys([1])).await;
}

#[tokio::test]
async fn the_feed_backs_off_from_a_server_that_fails_longer_than_a_relist_interval() {
    let pace = WatchPacing { relist: Duration::from_millis(500), ..QUICK };
    let cases = FAILURES.map(|manner| async move {
        let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
        server.put(vmi(1));
        let mut node = Node::paced(&server, &kubelet, None, pace);
        node.until("the start", |node| node.synced).await;
        let since = (Instant::now(), server.requests());
        server.behave(manner);
        assert_few_requests(&server, &pace, since, &format!("{manner:?}")).await;
        assert_eq!(node.keys(), keys([1]), "every record stays");
        server.behave(Manner::Well);
        server.put(vmi(2));
        node.until("its recovery", |node| node.keys() == keys([1, 2])).await;
    });
    futures_util::future::join_all(cases).await;
}

#[tokio::test]
async fn an_expired_history_is_no_failure_and_causes_a_list_at_once() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    // A pause after a failure would be longer than this test.
    let pause = 10 * PATIENCE;
    let pace = WatchPacing { first: pause, longest: pause, short: Duration::ZERO, ..QUICK };
    let mut node = Node::paced(&server, &kubelet, None, pace);
    node.until("the start", |node| node.synced).await;
    for number in [1, 2] {
        server.put(vmi(number));
        node.until("an event", |node| node.keys() == keys(1..=number)).await;
    }
    // The server restarts: it ends all watches and no longer has their resource versions.
    let (lists, _, expired) = server.counts();
    server.restart_with(vmi(3));
    node.until("the list", |node| node.keys() == keys(1..=3)).await;
    let (again, _, refused) = server.counts();
    assert!(refused > expired && again > lists, "{refused} watches were refused, {lists} and {again} lists");
    let report = node.contact.report(std::time::Instant::now());
    assert_eq!(report.failing, None);
    assert!(report.failures["gone"] >= 1, "{report:?}");
    assert_eq!(report.failures.values().sum::<u64>(), report.failures["gone"], "{report:?}");
}

/// Waits for the feed's first reported failure.
async fn first_failure(node: &Node) -> FailureStreak {
    let end = Instant::now() + PATIENCE;
    loop {
        let report = node.contact.report(std::time::Instant::now());
        match report.failing {
            Some(failing) => return failing,
            None => assert!(Instant::now() < end, "{report:?}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_cluster_without_kubevirt_is_reported_with_the_missing_definition() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    server.behave(Manner::Lacking);
    let failing = first_failure(&Node::paced(&server, &kubelet, None, QUICK)).await;
    let reason = "404 page not found; the cluster has no CustomResourceDefinition \
                  `virtualmachineinstances.kubevirt.io`: install KubeVirt";
    assert_eq!((&*failing.kind, &*failing.reason), ("not_found", reason));
}

#[tokio::test]
async fn white_space_around_a_token_is_not_sent() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let [token, kubeconfig] = ["token", "kubeconfig"].map(|name| kubelet.pods().join(name));
    server.put(vmi(1));
    for text in ["abc.def.ghi", "abc.def.ghi\n", " abc.def.ghi \r\n\n"] {
        std::fs::write(&token, text).unwrap();
        server.write_kubeconfig_as(&kubeconfig, &json!({"tokenFile": token})).unwrap();
        let mut node = Node::with_kubeconfig(kubeconfig.clone(), &kubelet, (None, QUICK), at_once);
        node.until("the start", |node| node.synced && node.keys() == keys([1])).await;
        assert_eq!(server.authorization().as_deref(), Some("Bearer abc.def.ghi"), "{text:?}");
    }
}

#[tokio::test]
async fn a_token_that_fits_no_header_is_reported_forbidden_with_its_file() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let [token, kubeconfig] = ["token", "kubeconfig"].map(|name| kubelet.pods().join(name));
    for text in ["abc\ndef", "abc\0", "", "\n"] {
        std::fs::write(&token, text).unwrap();
        server.write_kubeconfig_as(&kubeconfig, &json!({"tokenFile": token})).unwrap();
        let node = Node::with_kubeconfig(kubeconfig.clone(), &kubelet, (None, QUICK), at_once);
        let failing = first_failure(&node).await;
        assert_eq!(failing.kind, "forbidden", "{text:?}: {failing:?}");
        assert!(failing.reason.contains(&token.display().to_string()), "{text:?}: {failing:?}");
        assert!(!failing.reason.contains("abc"), "a secret: {failing:?}");
    }
    assert_eq!(server.requests(), 0, "without a token no request is sent");
}

#[tokio::test]
async fn the_contact_reports_the_last_answer_and_the_current_failure() {
    let expected = [
        (Manner::Away, "refused"),
        (Manner::Breaking, "unreachable"),
        (Manner::Forbidding, "forbidden"),
        (Manner::Lacking, "not_found"),
        (Manner::Expired, "gone"),
        (Manner::Brief, "cut_short"),
    ];
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let pace =
        WatchPacing { longest: Duration::from_millis(200), short: Duration::from_millis(200), ..QUICK };
    let mut node = Node::paced(&server, &kubelet, None, pace);
    node.until("the start", |node| node.synced).await;
    let contact = Arc::clone(&node.contact);
    let report = || contact.report(std::time::Instant::now());
    let until = async |what: &str, so: &dyn Fn() -> bool| {
        let end = Instant::now() + PATIENCE;
        while !so() {
            assert!(Instant::now() < end, "{what}: {:?}", report());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(report().answered.is_some());
    for (manner, kind) in expected {
        let before = report().failures[kind];
        server.behave(manner);
        until(kind, &|| report().failing.is_some_and(|failing| failing.kind == kind)).await;
        let now = report();
        assert!(now.failures[kind] > before, "{kind}: {now:?}");
        // A server in manner `Expired` still answers lists.
        let since = now.failing.as_ref().map_or(0.0, |failing| failing.since);
        assert!(
            now.answered.unwrap_or(now.asked_for) >= since || manner == Manner::Expired,
            "{kind}: {now:?}"
        );
        server.behave(Manner::Well);
        until("its recovery", &|| report().failing.is_none()).await;
    }
}
