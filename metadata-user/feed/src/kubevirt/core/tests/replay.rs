//! What a real KubeVirt 1.9 sent, replayed through the cores of two nodes, with faults.
//!
//! `tests/fixtures/kubevirt-1.9` has what the API server and the pods' namespaces showed: VMIs as sent, less what the
//! feed never reads, and devices. The VMs of [`MIGRATED`] have no `macAddress`, so that each pod's NIC has a
//! MAC other than the guest's after a live migration. The recorded migrations succeed; those that fail, are cancelled
//! or go there and back are made of their documents.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_common::mac::Mac;
use metadata_content::record::event::EventState;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::FeedEvent;
use crate::kubevirt::core::{Action, Core, EventReason, LINGER, VmiOrigin};
use crate::kubevirt::vmi::{NODE_LABEL, TARGET_LABEL};
use crate::kubevirt::{KubevirtOptions, Vmi, kept};
use crate::pods::{Pod, PodEvent, PodNic, PodUid, Tap, TapKind};
use metadata_content::record::RecordLimits;

/// Names of the nodes: the VMs start on the first.
const NODES: [&str; 2] = ["kvnode", "kvnode2"];
/// Recordings of VMs that migrate, and the MAC that each guest has all its life.
const MIGRATED: [(&str, &str); 2] = [("masquerade", "56:a1:a7:6f:a2:ac"), ("bridge", "8a:e1:04:5a:b0:61")];
/// The MAC of a hotplugged NIC in the pod where it was plugged, and that of its NIC in another pod.
const PLUGGED: [&str; 2] = ["0a:58:0a:80:00:06", "0a:58:0a:80:00:99"];
/// Replays of each story; the first is without faults.
const SEEDS: u64 = 16;
/// Devices of the hotplugged NIC: `printf red | sha256sum`.
const PLUGGED_DEVICES: [&str; 2] = ["podb1f51a511f1", "tapb1f51a511f1"];

/// One recorded change.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Seconds since the first.
    t: f64,
    vmi: Option<Value>,
    /// The UID of a VMI that was deleted.
    deleted: Option<String>,
    /// The phase of the migration.
    migration: Option<String>,
    pod: Option<String>,
    links: Option<Vec<Link>>,
    #[serde(default)]
    gone: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Link {
    name: String,
    kind: String,
    mac: String,
}

fn recorded(name: &str) -> Vec<Line> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/kubevirt-1.9");
    let text = std::fs::read_to_string(path.join(format!("{name}.jsonl"))).expect("a fixture");
    text.lines().map(|line| serde_json::from_str(line).expect("a line")).collect()
}

/// The pods of a recording, in order.
fn pods(lines: &[Line]) -> Vec<String> {
    let mut pods: Vec<String> = Vec::new();
    for pod in lines.iter().filter_map(|line| line.pod.as_ref()) {
        if !pods.contains(pod) {
            pods.push(pod.clone());
        }
    }
    pods
}

fn label<'a>(vmi: &'a Value, name: &str) -> Option<&'a str> {
    vmi["metadata"]["labels"][name].as_str()
}

/// The core of a node, and what the node shows.
struct Node {
    name: &'static str,
    core: Core,
    now: Instant,
    /// The devices of its pods.
    links: BTreeMap<String, Vec<Link>>,
    /// The pods that the core watches.
    watched: BTreeSet<String>,
    /// The identities published by key.
    identities: BTreeMap<String, BTreeSet<(String, Mac)>>,
    has_record: BTreeSet<String>,
    /// Every identity ever published.
    seen: BTreeSet<(String, Mac)>,
    reports: Vec<(EventReason, String)>,
    /// The states of events in records, in the order in which they were published, each once.
    announced: Vec<(String, EventState)>,
    /// The VMI as the API server has it, if one of the watches has it.
    at_server: Option<Value>,
    /// True while the API server cannot be reached.
    is_cut_off: bool,
}

impl Node {
    fn new(name: &'static str, now: Instant) -> Self {
        Self {
            name,
            core: Self::core(name),
            now,
            links: BTreeMap::new(),
            watched: BTreeSet::new(),
            identities: BTreeMap::new(),
            has_record: BTreeSet::new(),
            announced: Vec::new(),
            seen: BTreeSet::new(),
            reports: Vec::new(),
            at_server: None,
            is_cut_off: false,
        }
    }

    fn core(name: &str) -> Core {
        let read = |_: &PodUid, _: &str| Ok(None);
        Core::new(name.into(), KubevirtOptions::default(), RecordLimits::DEFAULT, 100, Arc::new(read))
    }

    fn watches_of(&self, vmi: Option<&Value>) -> impl Iterator<Item = (VmiOrigin, bool)> {
        let has = |name: &str| vmi.is_some_and(|vmi| label(vmi, name) == Some(self.name));
        [(VmiOrigin::Here, has(NODE_LABEL)), (VmiOrigin::Coming, has(TARGET_LABEL))].into_iter()
    }

    /// The API server has another version of the VMI, or none.
    fn change(&mut self, vmi: Option<&Value>) {
        let (former, key) = (self.at_server.take(), "default/vm");
        self.at_server = vmi.cloned();
        if self.is_cut_off {
            return;
        }
        let had: Vec<_> = self.watches_of(former.as_ref()).collect();
        let has: Vec<_> = self.watches_of(vmi).collect();
        for ((origin, had), (_, has)) in had.into_iter().zip(has) {
            match vmi.filter(|_| has) {
                Some(vmi) => {
                    self.core.applied(origin, Vmi::from_value(vmi.clone()).expect("a VMI"), self.now)
                }
                None if had => self.core.gone(origin, key, self.now),
                None => {}
            }
            self.act();
        }
    }

    /// Both watches list what the API server has.
    fn list(&mut self) {
        let vmi = self.at_server.clone();
        for (origin, has) in self.watches_of(vmi.as_ref()).collect::<Vec<_>>() {
            let mut keys = BTreeSet::new();
            if let Some(vmi) = vmi.as_ref().filter(|_| has) {
                self.core.applied(origin, Vmi::from_value(vmi.clone()).expect("a VMI"), self.now);
                keys.insert("default/vm".to_owned());
            }
            self.core.listed(origin, &keys, self.now);
            self.act();
        }
        self.core.listed(VmiOrigin::Kept, &BTreeSet::new(), self.now);
        self.act();
    }

    fn show(&mut self, pod: &str, links: Vec<Link>) {
        self.links.insert(pod.to_owned(), links);
        if self.watched.contains(pod) {
            self.look(pod);
        }
    }

    fn look(&mut self, uid: &str) {
        let Some(links) = self.links.get(uid) else { return };
        let pod: PodUid = uid.parse().expect("a UID");
        let mac = |link: &Link| link.mac.parse().expect("a MAC");
        let tap =
            |link: &Link| Tap { ifname: link.name.clone(), kind: TapKind::Tap, mac: mac(link), queues: 1 };
        let nic = |link: &Link| PodNic { name: link.name.clone(), kind: link.kind.clone(), mac: mac(link) };
        let (taps, nics): (Vec<_>, Vec<_>) = links.iter().partition(|link| link.kind == "tun");
        let holder = self.core.owners.get(&pod).and_then(|key| self.core.vmis.get(key));
        let found = Pod {
            uid: pod.clone(),
            pid: 42,
            vmi: holder.map(|known| known.vmi.metadata.uid.clone()).unwrap_or_default(),
            netns: format!("/proc/{uid}/ns/net"),
            taps: taps.into_iter().map(tap).collect(),
            nics: nics.into_iter().map(nic).collect(),
        };
        self.core.pod(&pod, PodEvent::Taps(found), self.now);
        self.act();
    }

    fn end(&mut self, pod: &str) {
        self.links.remove(pod);
        if self.watched.contains(pod) {
            self.core.pod(&pod.parse().expect("a UID"), PodEvent::Gone, self.now);
            self.act();
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.core.tick(self.now);
        self.act();
    }

    /// Another agent starts with what the former kept, before it hears of the API server.
    fn restart(&mut self) {
        let bytes = kept::encode(self.core.vmis()).expect("JSON");
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(kept::FILE);
        kept::write(&path, &bytes).expect("a file");
        self.core = Self::core(self.name);
        self.watched.clear();
        self.identities.clear();
        self.has_record.clear();
        for vmi in kept::read(&path).expect("a list") {
            self.core.applied(VmiOrigin::Kept, vmi, self.now);
            self.act();
        }
    }

    /// Carries out the core's actions until there are none.
    fn act(&mut self) {
        loop {
            if let Some(job) = self.core.next_job(self.now) {
                self.core.translated(job.run(), self.now);
                continue;
            }
            let actions = self.core.actions();
            if actions.is_empty() && self.core.next_job_at().is_none() {
                return;
            }
            if let Some(ready) = self.core.next_job_at() {
                self.now = self.now.max(ready);
            }
            actions.into_iter().for_each(|action| self.take(action));
        }
    }

    fn take(&mut self, action: Action) {
        match action {
            Action::Publish(FeedEvent::Upsert { key, record }) => {
                self.has_record.insert(key.clone());
                for event in &record.events {
                    let kind = event.id.as_str().split('-').next().unwrap_or_default();
                    let known = (kind.to_owned(), event.state);
                    if !self.announced.contains(&known) {
                        self.announced.push(known);
                    }
                }
                self.publish(key, record.identities());
            }
            Action::Publish(FeedEvent::Expect { key, identities }) => self.publish(key, identities),
            Action::Publish(FeedEvent::Remove { key }) => {
                self.has_record.remove(&key);
                self.identities.remove(&key);
            }
            Action::Watch(uid, _) => {
                let uid = uid.to_string();
                if self.watched.insert(uid.clone()) {
                    self.look(&uid);
                }
            }
            Action::Leave(uid) => _ = self.watched.remove(&uid.to_string()),
            Action::Report(report) => self.reports.push((report.reason, report.message)),
            Action::Publish(FeedEvent::RemoveUnless { key, .. }) => panic!("{key} may go"),
            Action::Publish(FeedEvent::Rejected { .. } | FeedEvent::Synced) | Action::Inlet(..) => {}
        }
    }

    fn publish(&mut self, key: String, identities: Vec<(metadata_common::port::PortName, Mac)>) {
        let identities = identities.into_iter().map(|(port, mac)| (port.ifname, mac));
        let identities: BTreeSet<_> = identities.collect();
        self.seen.extend(identities.clone());
        self.identities.insert(key, identities);
    }
}

/// What happens besides what was recorded.
#[derive(Default)]
struct Faults {
    /// Of 100 steps, before how many the node's agent is restarted, its API server lost or found, its last version of
    /// the VMI sent again, or its devices shown late.
    percent: u32,
    seed: u64,
}

/// Replays lines on both nodes. Calls `check` after each line.
fn replay(lines: &[Line], faults: &Faults, mut check: impl FnMut(&Line, &[Node; 2])) -> [Node; 2] {
    let mut rng = fastrand::Rng::with_seed(faults.seed);
    let start = Instant::now();
    let mut nodes = NODES.map(|name| Node::new(name, start));
    let mut node_of: BTreeMap<String, usize> = BTreeMap::new();
    // A pod's devices are shown before the VMI names its node.
    for line in lines {
        let active = line.vmi.iter().flat_map(|vmi| vmi["status"]["activePods"].as_object()).flatten();
        for (pod, node) in active {
            if let Some(at) = NODES.iter().position(|name| node.as_str() == Some(name)) {
                node_of.insert(pod.clone(), at);
            }
        }
    }
    let mut late: Vec<(usize, String, Vec<Link>)> = Vec::new();
    for line in lines {
        for node in &mut nodes {
            let time = start + Duration::from_secs_f64(line.t);
            node.pass(time.saturating_duration_since(node.now));
            if rng.u32(0..100) < faults.percent {
                match rng.u32(0..4) {
                    0 => {
                        node.restart();
                        if !node.is_cut_off {
                            node.list();
                        }
                    }
                    1 if node.is_cut_off => {
                        node.is_cut_off = false;
                        node.list();
                    }
                    1 => node.is_cut_off = true,
                    2 if !node.is_cut_off => node.list(),
                    _ => {}
                }
            }
        }
        if rng.u32(0..100) < 50 {
            late.drain(..).for_each(|(at, pod, links)| nodes[at].show(&pod, links));
        }
        if line.vmi.is_some() || line.deleted.is_some() {
            for node in &mut nodes {
                node.change(line.vmi.as_ref());
            }
        }
        if let Some(pod) = &line.pod {
            let at = node_of[pod];
            match line.links.clone() {
                _ if line.gone => {
                    late.retain(|(_, of, _)| of != pod);
                    nodes[at].end(pod);
                }
                Some(links) if rng.u32(0..100) < faults.percent => late.push((at, pod.clone(), links)),
                Some(links) => {
                    late.retain(|(_, of, _)| of != pod);
                    nodes[at].show(pod, links);
                }
                None => {}
            }
        }
        check(line, &nodes);
    }
    for node in &mut nodes {
        node.is_cut_off = false;
        node.list();
        node.pass(LINGER * 2);
    }
    late.drain(..).for_each(|(at, pod, links)| nodes[at].show(&pod, links));
    nodes
}

/// Gives the VMI of all lines the name by which [`Node::change`] knows it.
fn named(mut lines: Vec<Line>) -> Vec<Line> {
    lines
        .iter_mut()
        .filter_map(|line| line.vmi.as_mut())
        .for_each(|vmi| vmi["metadata"]["name"] = "vm".into());
    lines
}

/// The lines up to the deletion of the VM, which nothing precedes that ends it.
fn life(name: &str) -> Vec<Line> {
    let lines = named(recorded(name));
    let is_end = |line: &Line| line.vmi.as_ref().is_some_and(|vmi| vmi["status"]["phase"] == "Succeeded");
    let end = lines.iter().position(is_end).expect("an end");
    let [_, target] = &pods(&lines)[..] else { panic!("two pods") };
    let lines = lines[..end].iter();
    // The target's namespace is emptied before the VMI says that the VM has ended.
    lines
        .filter(|line| {
            line.pod.as_ref() != Some(target) || line.links.as_ref().is_some_and(|l| !l.is_empty())
        })
        .cloned()
        .collect()
}

fn at(line: &Line, time: f64) -> Line {
    Line { t: time, ..line.clone() }
}

/// The position of the first line that satisfies a condition on its VMI.
fn first(lines: &[Line], is: impl Fn(&Value) -> bool) -> usize {
    lines.iter().position(|line| line.vmi.as_ref().is_some_and(&is)).expect("such a VMI")
}

/// A migration that ends on its source: `lines` up to `cut`, then the target's pod ends and the VMI forgets it.
fn broken(lines: &[Line], cut: usize, state: &Value) -> Vec<Line> {
    let [_, target] = &pods(lines)[..] else { panic!("two pods") };
    let before = first(lines, |vmi| vmi["status"]["activePods"].get(target).is_some());
    let before = lines[..before].iter().rev().find_map(|line| line.vmi.clone()).expect("a VMI");
    let mut back = before;
    back["status"]["migrationState"] = state.clone();
    let mut lines = lines[..cut].to_vec();
    let now = lines.last().expect("a line").t;
    let none =
        Line { t: now, vmi: None, deleted: None, migration: None, pod: None, links: None, gone: false };
    let ended = Line { pod: Some(target.clone()), gone: true, ..none.clone() };
    // The pod may end before or after the VMI forgets it.
    let forgotten = Line { vmi: Some(back), ..none.clone() };
    lines.extend([at(&forgotten, now + 1.0), at(&ended, now + 30.0), at(&none, now + 60.0)]);
    lines
}

/// The same VM migrated back: the recorded migration again, with nodes exchanged and a third pod.
fn there_and_back(lines: &[Line]) -> Vec<Line> {
    let [source, target] = &pods(lines)[..] else { panic!("two pods") };
    let third = "00000000-1111-4222-8333-444444444444";
    let begin = first(lines, |vmi| vmi["status"]["activePods"].get(target).is_some());
    let shift = lines.last().expect("a line").t + 10.0 - lines[begin].t;
    let text = |text: &str| {
        let text = text.replace(NODES[1], "@").replace(NODES[0], NODES[1]).replace('@', NODES[0]);
        text.replace(target, third).replace(source, target)
    };
    let mut all = lines.to_vec();
    for line in &lines[begin..] {
        let mut line = at(line, line.t + shift);
        line.vmi = line.vmi.map(|vmi| serde_json::from_str(&text(&vmi.to_string())).expect("JSON"));
        line.pod = line.pod.map(|pod| text(&pod));
        for link in line.links.iter_mut().flatten().filter(|link| link.name.starts_with("eth0")) {
            link.mac = "0a:58:0a:80:00:33".into();
        }
        all.push(line);
    }
    all
}

/// The same VM with a NIC that is plugged in while it runs on its first node.
fn with_plugged_nic(lines: &[Line]) -> Vec<Line> {
    let first_pod = pods(lines)[0].clone();
    let running = first(lines, |vmi| vmi["status"]["phase"] == "Running");
    let [nic, tap] = PLUGGED_DEVICES;
    let mut lines = lines.to_vec();
    let shown = lines[..running].iter().rev().find(|line| line.links.is_some()).cloned().expect("devices");
    let mut plugged = at(&shown, lines[running].t);
    plugged.vmi = None;
    for (nth, line) in lines[running..].iter_mut().enumerate() {
        let Some(vmi) = &mut line.vmi else { continue };
        let red = json!({"name": "red", "bridge": {}});
        vmi["spec"]["domain"]["devices"]["interfaces"].as_array_mut().expect("NICs").push(red);
        let red = json!({"name": "red", "multus": {"networkName": "red"}});
        vmi["spec"]["networks"].as_array_mut().expect("networks").push(red);
        let status = match nth {
            0 => json!({"name": "red", "podInterfaceName": nic, "infoSource": "multus-status"}),
            _ => {
                json!({"name": "red", "podInterfaceName": nic, "infoSource": "domain, multus-status", "mac": PLUGGED[0]})
            }
        };
        vmi["status"]["interfaces"].as_array_mut().expect("NICs").push(status);
    }
    lines.insert(running + 1, plugged);
    for line in &mut lines[running + 1..] {
        let is_first = line.pod.as_ref() == Some(&first_pod);
        if let Some(links) = line.links.as_mut().filter(|links| !links.is_empty()) {
            let mac = PLUGGED[usize::from(!is_first)].to_owned();
            links.push(Link { name: nic.into(), kind: "veth".into(), mac });
            links.push(Link { name: tap.into(), kind: "tun".into(), mac: "0e:00:00:00:00:01".into() });
        }
    }
    lines
}

/// How a story ends: the node that serves the VM.
type Story = (&'static str, Vec<Line>, usize);

fn stories(name: &str) -> Vec<Story> {
    let lines = life(name);
    let source = pods(&lines)[0].clone();
    let is_last = |line: &Line| line.links.as_ref().is_some_and(Vec::is_empty) || line.gone;
    // The source's namespace is emptied before the VMI says that the VM has moved.
    let switch =
        lines.iter().position(|line| line.pod.as_ref() == Some(&source) && is_last(line)).expect("an end");
    let coming = first(&lines, |vmi| label(vmi, TARGET_LABEL).is_some());
    let failed = json!({"failed": true, "completed": true, "sourceNode": NODES[0], "targetNode": NODES[1]});
    let cancelled =
        json!({"abortRequested": true, "abortStatus": "Succeeded", "completed": true, "failed": true});
    let back = there_and_back(&lines);
    vec![
        ("as recorded", lines.clone(), 1),
        ("a migration that fails at its end", broken(&lines, switch, &failed), 0),
        ("a migration that is cancelled at its start", broken(&lines, coming + 1, &cancelled), 0),
        ("there and back", back.clone(), 0),
        ("with a hotplugged NIC", with_plugged_nic(&lines), 1),
        ("with a hotplugged NIC, there and back", with_plugged_nic(&back), 0),
    ]
}

/// Checks that no other MAC than the guest's was ever published for a port.
fn assert_macs(node: &Node, mac: &str, what: &str) {
    for (port, seen) in &node.seen {
        let wanted = if *port == PLUGGED_DEVICES[1] { PLUGGED[0] } else { mac };
        assert_eq!(seen.to_string(), wanted, "{what}: {port} on {}", node.name);
    }
}

#[test]
fn a_guest_keeps_its_mac_through_every_migration_and_fault() {
    for (name, mac) in MIGRATED {
        for (story, lines, home) in stories(name) {
            for seed in 0..SEEDS {
                let faults = Faults { percent: if seed == 0 { 0 } else { 15 }, seed };
                let what = format!("{name}, {story}, seed {seed}");
                let nodes = replay(&lines, &faults, |_, _| {});
                for node in &nodes {
                    assert_macs(node, mac, &what);
                }
                assert_eq!(nodes[home].has_record.len(), 1, "{what}: one record at home");
                assert!(!nodes[home].seen.is_empty(), "{what}");
                assert!(nodes[1 - home].has_record.is_empty(), "{what}: {:?}", nodes[1 - home].has_record);
                let tap =
                    |port: &str| nodes[home].identities.values().flatten().any(|(name, _)| name == port);
                assert!(tap("tap0"), "{what}: {:?}", nodes[home].identities);
                assert_eq!(tap(PLUGGED_DEVICES[1]), story.contains("hotplugged"), "{what}");
            }
        }
    }
}

#[test]
fn the_target_of_a_recorded_migration_is_served_before_its_switch() {
    for (name, _) in MIGRATED {
        let mut ready = 0;
        replay(&life(name), &Faults::default(), |line, nodes| {
            // From `Running` on the guest may run on either side.
            if line.migration.as_deref() == Some("Running") {
                ready = nodes.iter().filter(|node| node.has_record.len() == 1).count();
            }
        });
        assert_eq!(ready, 2, "{name}");
    }
}

#[test]
fn a_recorded_migration_is_announced_to_its_guest_before_it_begins() {
    let migration = |state| ("migration".to_owned(), state);
    for (name, _) in MIGRATED {
        let nodes = replay(&life(name), &Faults::default(), |_, _| {});
        let [source, target] = &nodes[..] else { panic!("two nodes") };
        // Then the VMI is the target's.
        let expected = [EventState::Scheduled, EventState::Started].map(migration);
        assert_eq!(source.announced, expected, "{name} on the source");
        let expected = [EventState::Scheduled, EventState::Started, EventState::Completed].map(migration);
        assert_eq!(target.announced, expected, "{name} on the target");
    }
}

#[test]
fn no_recorded_start_or_migration_is_reported_as_degraded() {
    for (name, _) in MIGRATED {
        for node in replay(&life(name), &Faults::default(), |_, _| {}) {
            let degraded = node.reports.iter().filter(|(reason, _)| *reason == EventReason::Degraded);
            assert_eq!(degraded.count(), 0, "{name} on {}: {:?}", node.name, node.reports);
        }
    }
}

/// Paths of the values of a document, with `[]` for any element and the value's type.
fn paths(value: &Value, path: &str, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| paths(value, &format!("{path}.{name}"), into));
        }
        Value::Array(items) => items.iter().for_each(|item| paths(item, &format!("{path}[]"), into)),
        Value::Null => {}
        Value::Bool(_) | Value::Number(_) | Value::String(_) => _ = into.insert(path.to_owned()),
    }
}

/// Parts of imagined VMIs that the recorded VMs do not have, because they use other features of KubeVirt.
const NOT_RECORDED: [&str; 14] = [
    ".metadata.resourceVersion",
    ".spec.accessCredentials",
    ".spec.domain.cpu",
    ".spec.domain.devices.disks",
    ".spec.domain.devices.interfaces[].binding",
    ".spec.domain.devices.interfaces[].model",
    ".spec.domain.devices.interfaces[].ports",
    ".spec.domain.devices.interfaces[].state",
    ".spec.domain.devices.networkInterfaceMultiqueue",
    ".spec.domain.memory",
    ".spec.domain.resources",
    ".spec.networks[].multus",
    ".spec.volumes",
    ".status.interfaces[].interfaceName",
];

#[test]
fn the_imagined_vmi_has_the_form_of_the_recorded_ones() {
    let mut real = BTreeSet::new();
    for name in ["masquerade", "bridge", "mac-address", "passt", "secret"] {
        recorded(name).iter().filter_map(|line| line.vmi.as_ref()).for_each(|vmi| paths(vmi, "", &mut real));
    }
    let is_map = |path: &str| {
        [".metadata.labels.", ".metadata.annotations.", ".status.activePods."]
            .iter()
            .any(|map| path.starts_with(map))
    };
    let mut imagined = BTreeSet::new();
    let vmi = include_str!("../../translate/fixtures/vmi.json");
    paths(&serde_json::from_str(vmi).expect("JSON"), "", &mut imagined);
    let strange = imagined.difference(&real).filter(|path| !is_map(path));
    let strange = strange.filter(|path| !NOT_RECORDED.iter().any(|known| path.starts_with(known)));
    assert_eq!(strange.collect::<Vec<_>>(), Vec::<&String>::new());
    // Where the domain has a NIC, the status has its MAC and its source, which is what the feed uses.
    for name in ["masquerade", "bridge", "mac-address", "passt", "secret"] {
        for vmi in recorded(name).into_iter().filter_map(|line| line.vmi) {
            let known = Vmi::from_value(vmi.clone()).expect("a VMI");
            for (raw, entry) in
                vmi["status"]["interfaces"].as_array().into_iter().flatten().zip(&known.status.interfaces)
            {
                assert_eq!(
                    raw["mac"].as_str().map(str::to_owned),
                    entry.mac.map(|mac| mac.to_string()),
                    "{raw}"
                );
                assert_eq!(raw["infoSource"].is_string(), raw["mac"].is_string(), "{raw}");
            }
        }
    }
}
