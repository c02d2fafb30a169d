//! The feed turns what KubeVirt's API server sends into records, and keeps them through the server's failures.
//!
//! The feed and its watches are production code. The server is `support::apiserver`, and volumes are files. Launchers
//! are simulated: each pod is found as soon as the feed watches for it.

#[path = "kubevirt_feed/pauses.rs"]
mod pauses;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use metadata_content::record::{Record, RecordLimits};
use metadata_feed::FeedEvent;
use metadata_feed::contact::Contact;
use metadata_feed::kubevirt::{self, Feed, KubevirtOptions, Launchers, WatchPacing, follow};
use metadata_feed::pods::{Inlets, Pod, PodEvent, PodUid, PodsError, Tap, TapKind, Volumes};
use metadata_feed::state::save_queue::SaveQueue;
use serde_json::{Value, json};
use support::apiserver::ApiServer;
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
            "uid": format!("11111111-0000-4000-8000-{number:012}"),
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
            let pod = Pod { uid: uid.clone(), pid, netns, taps, nics: Vec::new() };
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
            (None, SaveQueue::default()),
            (kubevirt::contact(), watch::channel(BTreeMap::new()).1),
            tx,
        );
        let error = timeout(PATIENCE, served).await.expect("it ends").expect_err("no VM could be served");
        let (error, pods) = (error.to_string(), kubelet.join("pods").display().to_string());
        assert!(error.contains("kubevirt.kubelet") && error.contains(&pods), "{error}");
    }
}
