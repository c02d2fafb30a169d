//! The feed turns what KubeVirt's API server sends into records, and keeps them through the server's failures.
//!
//! The feed and its watches are production code. The server is `support::apiserver`, and volumes are files. Launchers
//! are simulated: each pod is found as soon as the feed watches for it.

use metadata_content::record::{Record, RecordLimits};
use metadata_content::sink::Outbox;
use metadata_feed::contact::Contact;
use metadata_feed::kubevirt::{Feed, KubevirtOptions, Launchers, WatchPacing, follow};
use metadata_feed::pods::{Inlets, Pod, PodEvent, PodUid, PodsError, Tap, TapKind, Volumes};
use metadata_feed::source::FailureStreak;
use metadata_feed::state::mailboxes::Mailboxes;
use metadata_feed::state::save_queue::SaveQueue;
use metadata_feed::{FeedEvent, kubevirt};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use support::apiserver::{ApiServer, Manner};
use support::pod::{Kubelet, Plugin};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

/// Bound on each wait; every step is much faster.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time without an event after which the feed counts as silent.
const QUIET: Duration = Duration::from_millis(700);

/// A VMI on node `n1` with one pod.
fn vmi(number: usize) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {
            "name": format!("vm-{number}"), "namespace": "shop",
            "uid": vmi_uid(&pod_of(number)),
            "labels": {"kubevirt.io/nodeName": "n1"},
        },
        "spec": {
            "domain": {
                "firmware": {"uuid": format!("22222222-0000-4000-8000-{number:012}")},
                "devices": {"interfaces": [
                    {"name": "default", "masquerade": {}, "macAddress": format!("02:00:00:00:{:02x}:{:02x}", number / 256, number % 256)},
                ]},
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "ci", "cloudInitNoCloud": {"userData": format!("#cloud-config\n# {number}\n")}}],
        },
        "status": {"phase": "Running", "activePods": {pod_of(number): "n1"}},
    })
}

/// The UID of the VMI that runs in a pod.
fn vmi_uid(pod: &str) -> String {
    pod.replace("33333333", "11111111")
}

fn pod_of(number: usize) -> String {
    format!("33333333-0000-4000-8000-{number:012}")
}

fn key(number: usize) -> String {
    format!("shop/vm-{number}")
}

/// The feed's last event for one VM.
#[derive(Clone, Debug)]
enum Known {
    Record(Arc<Record>),
    Expected,
}

impl Known {
    fn user_data(&self) -> String {
        let Self::Record(record) = self else { return "none yet".into() };
        let bytes = record.user_data.as_ref().and_then(|payload| payload.bytes()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn at_once(events: mpsc::Sender<(PodUid, PodEvent)>) -> Box<dyn Launchers> {
    Box::new(FindsAtOnce { found: BTreeSet::new(), events })
}

/// A feed and the state its events have built.
struct Node {
    events: mpsc::Receiver<FeedEvent>,
    known: BTreeMap<String, Known>,
    refused: BTreeMap<String, String>,
    synced: bool,
    pods: mpsc::Sender<(PodUid, PodEvent)>,
    contact: Arc<Contact>,
    feed: tokio::task::JoinHandle<()>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.feed.abort();
    }
}

impl Node {
    fn start(server: &ApiServer, kubelet: &Kubelet, kept: Option<PathBuf>) -> Self {
        Self::paced(server, kubelet, kept, WatchPacing::DEFAULT)
    }

    fn paced(server: &ApiServer, kubelet: &Kubelet, kept: Option<PathBuf>, pace: WatchPacing) -> Self {
        Self::with(server, kubelet, (kept, pace), at_once)
    }

    fn with(
        server: &ApiServer,
        kubelet: &Kubelet,
        (kept, pace): (Option<PathBuf>, WatchPacing),
        launchers: impl FnOnce(mpsc::Sender<(PodUid, PodEvent)>) -> Box<dyn Launchers>,
    ) -> Self {
        let kubeconfig = kubelet.pods().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig).expect("a kubeconfig");
        Self::with_kubeconfig(kubeconfig, kubelet, (kept, pace), launchers)
    }

    fn with_kubeconfig(
        kubeconfig: PathBuf,
        kubelet: &Kubelet,
        (kept, pace): (Option<PathBuf>, WatchPacing),
        launchers: impl FnOnce(mpsc::Sender<(PodUid, PodEvent)>) -> Box<dyn Launchers>,
    ) -> Self {
        let options: KubevirtOptions =
            serde_json::from_value(json!({"node": "n1", "kubeconfig": kubeconfig})).expect("options");
        let (pods, pod_events) = mpsc::channel(4_096);
        let launchers = launchers(pods.clone());
        let (tx, events) = mpsc::channel(1_024);
        let (_, hook) = mpsc::channel(1);
        let volumes = Volumes::new(kubelet.pods());
        let (contact, limits) = (kubevirt::contact(), RecordLimits::DEFAULT);
        let reports = Arc::clone(&contact);
        let saves = SaveQueue::default();
        tokio::spawn(saves.clone().run());
        let feed = Feed {
            options,
            limits,
            kept,
            saves,
            volumes,
            launchers,
            pod_events,
            hook,
            pace,
            contact: reports,
            services: None,
        };
        let feed = tokio::spawn(async move { follow(feed, tx).await.expect("the feed runs") });
        let (known, refused) = (BTreeMap::new(), BTreeMap::new());
        Self { events, known, refused, synced: false, pods, contact, feed }
    }

    fn on_event(&mut self, event: FeedEvent) {
        match event {
            FeedEvent::Upsert { key, record } => {
                self.refused.remove(&key);
                self.known.insert(key, Known::Record(record));
            }
            FeedEvent::Expect { key, .. } => _ = self.known.insert(key, Known::Expected),
            FeedEvent::Remove { key } => _ = self.known.remove(&key),
            FeedEvent::RemoveUnless { key, .. } => panic!("{key} may go"),
            FeedEvent::Rejected { key, error } => _ = self.refused.insert(key, error.to_string()),
            FeedEvent::Synced => self.synced = true,
        }
    }

    /// Handles events until the condition is true.
    async fn until(&mut self, what: &str, so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !so(self) {
            let event = tokio::time::timeout_at(end, self.events.recv()).await;
            let event =
                event.unwrap_or_else(|_| panic!("{what}: {:?} {:?}", self.known.keys(), self.refused));
            self.on_event(event.expect("the feed runs"));
        }
    }

    /// Checks that no event arrives within [`QUIET`].
    async fn expect_silence(&mut self, why: &str) {
        if let Ok(event) = timeout(QUIET, self.events.recv()).await {
            panic!("{why}: {event:?}");
        }
    }

    fn keys(&self) -> BTreeSet<String> {
        self.known.keys().cloned().collect()
    }

    async fn send_pod_event(&self, number: usize, event: PodEvent) {
        let uid = pod_of(number).parse().expect("a uid");
        self.pods.send((uid, event)).await.expect("the feed runs");
    }
}

/// Finds the launcher of each watched pod immediately.
struct FindsAtOnce {
    found: BTreeSet<PodUid>,
    events: mpsc::Sender<(PodUid, PodEvent)>,
}

impl Launchers for FindsAtOnce {
    fn watch(&mut self, uid: &PodUid, _: BTreeSet<String>) -> Result<(), PodsError> {
        if self.found.insert(uid.clone()) {
            let pid = 1_000 + u32::try_from(self.found.len()).expect("few pods");
            let taps = vec![Tap {
                ifname: "tap0".into(),
                kind: TapKind::Tap,
                mac: metadata_common::mac::Mac::default(),
                queues: 1,
            }];
            let netns = format!("/proc/{pid}/ns/net");
            let vmi = vmi_uid(uid.as_str());
            let pod = Pod { uid: uid.clone(), pid, vmi, netns, taps, nics: Vec::new() };
            self.events.try_send((uid.clone(), PodEvent::Found(pod))).expect("room for every pod");
        }
        Ok(())
    }

    fn forget(&mut self, uid: &PodUid) {
        self.found.remove(uid);
    }
}

/// Finds no launcher.
struct FindsNothing;

impl Launchers for FindsNothing {
    fn watch(&mut self, _: &PodUid, _: BTreeSet<String>) -> Result<(), PodsError> {
        Ok(())
    }

    fn forget(&mut self, _: &PodUid) {}
}

fn keys(numbers: impl IntoIterator<Item = usize>) -> BTreeSet<String> {
    numbers.into_iter().map(key).collect()
}

#[tokio::test]
async fn vmis_are_added_changed_and_removed() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    server.put(vmi(1));
    let mut elsewhere = vmi(2);
    elsewhere["metadata"]["labels"]["kubevirt.io/nodeName"] = "n2".into();
    server.put(elsewhere);
    let mut node = Node::start(&server, &kubelet, None);
    node.until("the existing VMIs", |node| node.synced).await;
    assert_eq!(node.keys(), keys([1]));
    assert_eq!(node.known[&key(1)].user_data(), "#cloud-config\n# 1\n");
    server.put(vmi(3));
    node.until("an added VMI", |node| node.known.contains_key(&key(3))).await;
    let mut changed = vmi(3);
    changed["spec"]["volumes"][0]["cloudInitNoCloud"]["userData"] = "#other\n".into();
    server.put(changed);
    node.until("a change", |node| node.known[&key(3)].user_data() == "#other\n").await;
    server.delete(&key(3));
    node.expect_silence("its launcher still runs").await;
    node.send_pod_event(3, PodEvent::Gone).await;
    node.until("the end", |node| !node.known.contains_key(&key(3))).await;
    let mut failed = vmi(1);
    failed["status"]["phase"] = "Failed".into();
    server.put(failed);
    node.until("a final phase", |node| node.known.is_empty()).await;
    let events = server.events();
    assert!(events.contains(&"ImdsReady shop/vm-1".to_owned()), "{events:?}");
}

#[tokio::test]
async fn a_listed_and_a_watched_vmi_belong_to_their_virtual_machine_and_announce_their_end() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let uid = |number: usize| format!("44444444-0000-4000-8000-{number:012}");
    let owned = |number: usize| {
        let mut vmi = vmi(number);
        vmi["metadata"]["ownerReferences"] = json!([{
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": format!("vm-{number}"),
            "uid": uid(number), "controller": true, "blockOwnerDeletion": true,
        }]);
        vmi
    };
    server.put(owned(1));
    let mut node = Node::start(&server, &kubelet, None);
    node.until("the start", |node| node.synced).await;
    server.put(owned(2));
    node.until("an added VMI", |node| node.known.contains_key(&key(2))).await;
    for number in [1, 2] {
        let Known::Record(record) = &node.known[&key(number)] else { panic!("{number} has no record") };
        assert_eq!(record.owner_text(), format!("kubevirt/shop/vm-{number}/{}", uid(number)));
        assert!(record.events.is_empty(), "{number} stays");
    }
    let mut deleted = owned(2);
    deleted["metadata"]["deletionTimestamp"] = "2026-11-23T10:00:00Z".into();
    server.put(deleted);
    let announces = |known: &Known| matches!(known, Known::Record(record) if !record.events.is_empty());
    node.until("the event", |node| announces(&node.known[&key(2)])).await;
}

#[tokio::test]
async fn a_thousand_vmis_at_once_are_all_reported() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let mut node = Node::start(&server, &kubelet, None);
    node.until("the start", |node| node.synced).await;
    for number in 0..1_000 {
        server.put(vmi(number));
        if number % 10 == 9 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    node.until("all of them", |node| node.known.len() == 1_000).await;
    assert_eq!(node.keys(), keys(0..1_000));
    assert_eq!(node.known[&key(999)].user_data(), "#cloud-config\n# 999\n");
    // A second agent lists them in pages.
    let mut next = Node::start(&server, &kubelet, None);
    next.until("all of them", |node| node.synced && node.known.len() == 1_000).await;
    assert_eq!(next.keys(), keys(0..1_000));
}

#[tokio::test]
async fn patched_vms_with_secrets_of_short_lines_keep_no_other_vm_waiting() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let lines = "k\n".repeat(1 << 19);
    let mut hostile = [1, 2].map(vmi);
    for (vmi, number) in hostile.iter_mut().zip(1..) {
        let secrets: Vec<_> = (0..12).map(|n| format!("s{n}")).collect();
        for secret in &secrets {
            let volume = format!("{secret}-access-cred");
            kubelet.write(&pod_of(number), Plugin::Secret, &volume, &[("keys", lines.as_bytes())]).unwrap();
        }
        let credential = |secret: &String| {
            json!({"sshPublicKey": {
                "source": {"secret": {"secretName": secret}}, "propagationMethod": {"noCloud": {}},
            }})
        };
        vmi["spec"]["accessCredentials"] = secrets.iter().map(credential).collect();
    }
    let mut node = Node::start(&server, &kubelet, None);
    for patch in 0..100 {
        for vmi in &mut hostile {
            vmi["metadata"]["annotations"] = json!({"patch": patch.to_string()});
            server.put(vmi.clone());
        }
        if patch == 50 {
            let mut modest = vmi(3);
            modest["metadata"]["namespace"] = "modest".into();
            server.put(modest);
        }
        tokio::task::yield_now().await;
    }
    node.until("the other VM", |node| node.known.contains_key("modest/vm-3")).await;
    node.until("the reason", |node| node.refused.len() == 2).await;
    assert!(node.refused[&key(1)].contains("accessCredentials"), "{:?}", node.refused);
}

#[tokio::test]
async fn a_watch_whose_history_has_expired_lists_again() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    for number in [1, 2] {
        server.put(vmi(number));
    }
    let mut node = Node::start(&server, &kubelet, None);
    node.until("the start", |node| node.synced).await;
    let (lists, ..) = server.counts();
    // These changes happen while no watch is open and expire before the next one opens.
    server.be_away(true);
    server.put(vmi(3));
    let mut ended = vmi(2);
    ended["status"]["phase"] = "Succeeded".into();
    server.put(ended);
    server.forget();
    server.be_away(false);
    node.until("the list", |node| node.keys() == keys([1, 3])).await;
    let (again, _, expired) = server.counts();
    assert!(expired >= 1 && again > lists, "{expired} watches were refused, {lists} and {again} lists");
}

#[tokio::test]
async fn a_bookmark_makes_a_list_after_a_lost_watch_unnecessary() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    server.put(vmi(1));
    let mut node = Node::start(&server, &kubelet, None);
    node.until("the start", |node| node.synced).await;
    let (lists, watches, _) = server.counts();
    let mut elsewhere = vmi(9);
    elsewhere["metadata"]["labels"]["kubevirt.io/nodeName"] = "n2".into();
    server.put(elsewhere);
    server.bookmark();
    node.expect_silence("a bookmark changes no VMI").await;
    server.forget();
    server.cut();
    server.put(vmi(2));
    node.until("later events", |node| node.keys() == keys([1, 2])).await;
    let (again, watched, expired) = server.counts();
    assert_eq!((again, expired), (lists, 0));
    assert!(watched > watches);
}

#[tokio::test]
async fn an_api_outage_removes_no_record() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    server.put(vmi(1));
    let mut node = Node::start(&server, &kubelet, None);
    node.until("the start", |node| node.synced).await;
    server.be_away(true);
    node.expect_silence("the server is away").await;
    // Pod events continue meanwhile.
    let token = b"e30.eyJleHAiOjE4OTM0NTYwMDB9.c2ln".as_slice();
    kubelet.write(&pod_of(1), Plugin::Projected, "imds-token", &[("token", token)]).unwrap();
    node.send_pod_event(1, PodEvent::Files { volume: "imds-token".into() }).await;
    let has_token = |known: &Known| matches!(known, Known::Record(record) if record.credentials.service_account.as_ref().is_some_and(|account| account.token.is_some()));
    node.until("a token", |node| has_token(&node.known[&key(1)])).await;
    server.put(vmi(2));
    node.expect_silence("the server is away").await;
    server.be_away(false);
    node.until("its return", |node| node.keys() == keys([1, 2])).await;
}

#[tokio::test]
async fn an_agent_started_during_an_api_outage_serves_the_saved_vmis() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let kept = kubelet.pods().join("vmis");
    for number in [1, 2] {
        server.put(vmi(number));
    }
    let mut node = Node::start(&server, &kubelet, Some(kept.clone()));
    node.until("the start", |node| node.synced).await;
    let end = Instant::now() + PATIENCE;
    while !kept.exists() && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    drop(node);
    server.be_away(true);
    server.delete(&key(2));
    let mut node = Node::start(&server, &kubelet, Some(kept));
    node.until("the saved VMIs", |node| node.synced).await;
    assert_eq!(node.keys(), keys([1, 2]));
    server.be_away(false);
    node.send_pod_event(2, PodEvent::Gone).await;
    node.until("the list", |node| node.keys() == keys([1])).await;
}

#[tokio::test]
async fn the_feed_is_synced_only_after_it_has_searched_for_every_launcher() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    server.put(vmi(1));
    let mut node = Node::with(&server, &kubelet, (None, WatchPacing::DEFAULT), |_| Box::new(FindsNothing));
    let early = timeout(kubevirt::LIST_TIMEOUT + Duration::from_secs(1), node.events.recv()).await;
    assert!(early.is_err(), "{early:?}");
    node.send_pod_event(1, PodEvent::Absent).await;
    node.until("the sync", |node| node.synced).await;
}

#[tokio::test]
async fn a_slow_server_and_answers_in_pieces_lose_nothing() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    server.be_slow(Duration::from_millis(300), Duration::from_millis(30));
    server.put(vmi(1));
    let mut node = Node::start(&server, &kubelet, None);
    node.until("a slow list", |node| node.synced).await;
    assert_eq!(node.keys(), keys([1]));
    (2..10).for_each(|number| server.put(vmi(number)));
    node.until("events in pieces", |node| node.keys() == keys(1..10)).await;
}

#[tokio::test]
async fn the_feed_waits_for_a_late_secret_and_follows_a_new_one() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let mut secretive = vmi(1);
    secretive["spec"]["volumes"] = json!([{"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}]);
    server.put(secretive);
    let mut node = Node::start(&server, &kubelet, None);
    node.until("its name", |node| matches!(node.known.get(&key(1)), Some(Known::Expected))).await;
    for text in ["#one\n", "#two\n"] {
        kubelet.write(&pod_of(1), Plugin::Secret, "ci-udata", &[("userdata", text.as_bytes())]).unwrap();
        node.send_pod_event(1, PodEvent::Files { volume: "ci-udata".into() }).await;
        node.until("the Secret", |node| node.known[&key(1)].user_data() == text).await;
    }
}

#[tokio::test]
async fn a_vm_that_migrates_is_served_on_both_nodes() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let mut node = Node::start(&server, &kubelet, None);
    node.until("the start", |node| node.synced).await;
    // The VM migrates to this node. Its label for the target is set first.
    let mut coming = vmi(1);
    coming["metadata"]["labels"] =
        json!({"kubevirt.io/nodeName": "n2", "kubevirt.io/migrationTargetNodeName": "n1"});
    coming["status"]["activePods"]["source"] = "n2".into();
    server.put(coming.clone());
    node.until("a standby", |node| node.keys() == keys([1])).await;
    server.put(vmi(1));
    node.expect_silence("the standby only became active").await;
    // The VM migrates to another node.
    let mut going = vmi(1);
    going["metadata"]["labels"]["kubevirt.io/migrationTargetNodeName"] = "n2".into();
    server.put(going.clone());
    going["metadata"]["labels"] = json!({"kubevirt.io/nodeName": "n2"});
    server.put(going);
    node.expect_silence("its launcher still runs").await;
    node.send_pod_event(1, PodEvent::Gone).await;
    node.until("the launcher's end", |node| node.known.is_empty()).await;
    // A migration to this node fails: the label is removed before the VM ran here.
    let mut coming = vmi(2);
    coming["metadata"]["labels"] =
        json!({"kubevirt.io/nodeName": "n2", "kubevirt.io/migrationTargetNodeName": "n1"});
    server.put(coming.clone());
    node.until("a standby", |node| node.keys() == keys([2])).await;
    coming["metadata"]["labels"] = json!({"kubevirt.io/nodeName": "n2"});
    server.put(coming);
    node.until("no standby", |node| node.known.is_empty()).await;
}

#[tokio::test]
async fn an_unreadable_vmi_is_reported_and_harms_no_other() {
    let (server, kubelet) = (ApiServer::start().unwrap(), Kubelet::new().unwrap());
    let mut odd = vmi(1);
    odd["spec"]["volumes"] = json!("none");
    server.put_as_it_is(odd);
    server.put(vmi(2));
    let mut sriov = vmi(3);
    sriov["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "fast", "sriov": {}}]);
    server.put(sriov);
    let mut node = Node::start(&server, &kubelet, None);
    node.until("the start", |node| node.synced && node.refused.len() == 2).await;
    assert_eq!(node.keys(), keys([2]));
    assert!(node.refused[&key(1)].contains("spec.volumes"), "{:?}", node.refused);
    assert!(node.refused[&key(3)].contains("binding `sriov`"), "{:?}", node.refused);
}

#[tokio::test]
async fn a_feed_without_kubelets_pod_directory_does_not_start() {
    let (server, room) = (ApiServer::start().unwrap(), tempfile::tempdir().unwrap());
    let kubeconfig = room.path().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig).unwrap();
    std::fs::write(room.path().join("pods"), "a file").unwrap();
    for kubelet in [room.path().join("none"), room.path().into()] {
        let options = json!({"node": "n1", "kubelet": kubelet, "kubeconfig": kubeconfig});
        let options: KubevirtOptions = serde_json::from_value(options).unwrap();
        let (tx, _events) = mpsc::channel(1);
        let served = kubevirt::serve(
            (options, Inlets::default()),
            RecordLimits::DEFAULT,
            (None, SaveQueue::default(), Arc::new(Mailboxes::in_memory(Outbox::detached()))),
            (kubevirt::contact(), watch::channel(BTreeMap::new()).1),
            tx,
        );
        let error = timeout(PATIENCE, served).await.expect("it ends").expect_err("no VM could be served");
        let (error, pods) = (error.to_string(), kubelet.join("pods").display().to_string());
        assert!(error.contains("kubevirt.kubelet") && error.contains(&pods), "{error}");
    }
}

// The feed backs off from a failing API server, lists at once after the server has lost its history, and reports when
// the server last answered.

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
