//! Each test passes in events of a VMI and its pods, and compares the resulting actions.

mod admission;
mod replay;

use metadata_common::mac::Mac;
use metadata_content::record::{Record, RecordLimits};
use metadata_content::source::RecordSource;
use metadata_links::inlet;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::Core;
use crate::kubevirt::core::{
    Action, EventReason, GRACE, LINGER, NIC_KEPT, REPORT_EVERY, REPORTS_AT_ONCE, VmiOrigin,
};
use crate::kubevirt::translate::VolumeFiles;
use crate::kubevirt::{KubevirtOptions, Passt, Vmi};
use crate::memory_budget::MemoryBudget;
use crate::pods::{Pod, PodEvent, PodNic, PodUid, PodsError, Tap, TapKind};
use crate::registry::RecordId;
use crate::source::ServingState;
use crate::{FeedError, FeedEvent};

/// Volumes by pod and name.
type Disk = Arc<Mutex<BTreeMap<(String, String), VolumeFiles>>>;

/// The UID of a VMI.
const VMI_UID: &str = "b5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10";

/// A core, the current time, and the volumes of its pods.
struct Story {
    core: Core,
    now: Instant,
    disk: Disk,
}

fn vmi(pods: &[&str]) -> Value {
    let active: BTreeMap<_, _> = pods.iter().map(|uid| (*uid, "here")).collect();
    json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": VMI_UID,
            "ownerReferences": []},
        "spec": {
            "domain": {
                "firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"},
                "devices": {"interfaces": [{"name": "default", "masquerade": {}, "macAddress": "02:00:00:00:00:01"}]},
            },
            "networks": [{"name": "default", "pod": {}}],
        },
        "status": {"phase": "Running", "activePods": active},
    })
}

/// A VMI with one pod, changed by the test.
fn vmi_with(change: impl FnOnce(&mut Value)) -> Value {
    let mut vmi = vmi(&["p"]);
    change(&mut vmi);
    vmi
}

/// A VMI with one pod and this NIC.
fn vmi_on(interface: Value) -> Value {
    vmi_with(|vmi| vmi["spec"]["domain"]["devices"]["interfaces"] = json!([interface]))
}

/// Another VMI of the same name.
fn next_vmi(pod: &str) -> Value {
    let mut next = vmi(&[pod]);
    next["metadata"]["uid"] = "c5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10".into();
    next
}

/// Like [`vmi`], with user-data in a Secret.
fn secretive(pods: &[&str]) -> Value {
    let mut vmi = vmi(pods);
    vmi["spec"]["volumes"] = json!([{"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}]);
    vmi
}

fn pod(uid: &str, pid: u32) -> Pod {
    let tap = Tap { ifname: "tap0".into(), kind: TapKind::Tap, mac: Mac::default(), queues: 1 };
    let (uid, netns) = (uid.parse().expect("a uid"), format!("/proc/{pid}/ns/net"));
    Pod { uid, pid, vmi: VMI_UID.into(), netns, taps: vec![tap], nics: Vec::new() }
}

fn nic(name: &str, mac: [u8; 6]) -> PodNic {
    PodNic { name: name.into(), kind: "veth".into(), mac: Mac(mac) }
}

impl Story {
    fn begin() -> Self {
        Self::with(KubevirtOptions::default())
    }

    /// With a VMI that a watch of this node names.
    fn of(vmi: Value) -> Self {
        let mut story = Self::begin();
        story.apply(VmiOrigin::Here, vmi);
        story
    }

    /// With a VMI whose launcher is found.
    fn served() -> Self {
        let mut story = Self::of(vmi(&["p"]));
        story.found("p");
        story
    }

    fn with(options: KubevirtOptions) -> Self {
        let disk = Disk::default();
        let volumes = Arc::clone(&disk);
        let read = move |uid: &PodUid, volume: &str| {
            let place = (format!("{uid}"), volume.to_owned());
            Ok(volumes.lock().expect("no panic").get(&place).cloned())
        };
        let core = Core::new("here".into(), options, RecordLimits::DEFAULT, 100, Arc::new(read));
        Self { core, now: Instant::now(), disk }
    }

    fn put(&self, uid: &str, volume: &str, file: &str, text: &str) {
        let files = VolumeFiles::from([(file.to_owned(), text.to_owned().into())]);
        self.disk.lock().expect("no panic").insert((uid.into(), volume.into()), files);
    }

    fn apply(&mut self, origin: VmiOrigin, vmi: Value) -> Vec<String> {
        self.core.applied(origin, Vmi::from_value(vmi).expect("a VMI"), self.now);
        self.actions()
    }

    fn lose(&mut self, origin: VmiOrigin) -> Vec<String> {
        self.lose_of(origin, "shop/web")
    }

    fn lose_of(&mut self, origin: VmiOrigin, key: &str) -> Vec<String> {
        self.core.gone(origin, key, self.now);
        self.actions()
    }

    fn pod(&mut self, uid: &str, event: PodEvent) -> Vec<String> {
        self.core.pod(&uid.parse().expect("a uid"), event, self.now);
        self.actions()
    }

    /// The launcher of a pod is found, and runs the VMI that has the pod.
    fn found(&mut self, uid: &str) -> Vec<String> {
        let holder = self.core.owners.get(&uid.parse::<PodUid>().expect("a uid"));
        let holder = holder.and_then(|key| self.core.vmis.get(key)).map(|known| Arc::clone(&known.vmi));
        self.found_running(uid, holder.as_ref().map_or(VMI_UID, |vmi| &vmi.metadata.uid))
    }

    /// The launcher of a pod is found, and runs the VMI of this UID.
    fn found_running(&mut self, uid: &str, vmi: &str) -> Vec<String> {
        self.pod(uid, PodEvent::Found(Pod { vmi: vmi.into(), ..pod(uid, 42) }))
    }

    fn pass(&mut self, time: Duration) -> Vec<String> {
        self.now += time;
        self.core.tick(self.now);
        self.actions()
    }

    /// Runs all translations, and waits until each may run.
    fn translate(&mut self) {
        loop {
            if let Some(job) = self.core.next_job(self.now) {
                self.core.translated(job.run(), self.now);
            } else if let Some(ready) = self.core.next_job_at() {
                self.now = self.now.max(ready);
            } else {
                return;
            }
        }
    }

    /// The actions since the last call.
    fn all_actions(&mut self) -> Vec<Action> {
        self.translate();
        self.core.actions()
    }

    /// The actions since the last call, abbreviated. They omit watched volumes, which another test covers.
    fn actions(&mut self) -> Vec<String> {
        let actions = self.all_actions().into_iter();
        let actions =
            actions.filter(|action| !matches!(action, Action::Watch(_, volumes) if !volumes.is_empty()));
        let word = |action| match action {
            Action::Publish(FeedEvent::Upsert { key, record }) => format!("+{key} {}", record.generation),
            Action::Publish(FeedEvent::Expect { key, identities }) => format!("?{key} {}", identities.len()),
            Action::Publish(FeedEvent::Remove { key }) => format!("-{key}"),
            Action::Publish(FeedEvent::RemoveUnless { key, .. }) => format!("-{key} unless"),
            Action::Publish(FeedEvent::Rejected { key, .. }) => format!("!{key}"),
            Action::Publish(FeedEvent::Synced) => "synced".into(),
            Action::Watch(uid, _) => format!("watch {uid}"),
            Action::Inlet(uid, mac) => {
                format!("inlet {uid} {}", mac.map_or("none".into(), |mac| mac.to_string()))
            }
            Action::Leave(uid) => format!("leave {uid}"),
            Action::Report(report) => format!("{} {}", report.reason.as_str(), report.name),
        };
        actions.map(word).collect()
    }
}

const NOTHING: [&str; 0] = [];

// The end of a VM, and its migration.

#[test]
fn a_vm_ends_with_its_launcher_and_stays_ended_on_old_events() {
    let mut story = Story::served();
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), NOTHING);
    assert_eq!(story.found("p"), NOTHING);
    // A restart: the same name, another VMI and another pod.
    assert_eq!(story.apply(VmiOrigin::Here, next_vmi("q")), ["watch q"]);
    assert_eq!(story.found("q"), ["+shop/web 102", "ImdsReady web"]);
}

#[test]
fn a_new_vmi_of_the_same_name_inherits_nothing() {
    let mut story = Story::served();
    assert_eq!(story.apply(VmiOrigin::Here, next_vmi("p")), ["-shop/web", "leave p", "watch p"]);
}

#[test]
fn a_final_phase_an_opt_out_and_a_departed_pod_each_end_a_vm() {
    let changes: [fn(&mut Value); 3] = [
        |vmi| vmi["status"]["phase"] = "Failed".into(),
        |vmi| vmi["metadata"]["annotations"] = json!({"imds.kubevirt.io/enabled": "false"}),
        |vmi| vmi["status"]["activePods"] = json!({"p": "elsewhere"}),
    ];
    for change in changes {
        let mut story = Story::served();
        assert_eq!(story.apply(VmiOrigin::Here, vmi_with(change)), ["-shop/web", "leave p"]);
    }
}

#[test]
fn a_deleted_vmi_ends_at_once_or_with_its_launcher() {
    let mut story = Story::of(vmi(&["p"]));
    assert_eq!(story.lose(VmiOrigin::Here), ["leave p"]);
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    story.found("p");
    assert_eq!(story.lose(VmiOrigin::Here), NOTHING);
    assert_eq!(story.pass(LINGER * 100), NOTHING);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn the_target_of_a_migration_is_served_before_it_runs_and_after() {
    let mut story = Story::begin();
    assert_eq!(story.apply(VmiOrigin::Coming, vmi(&["p"])), ["watch p"]);
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    // The target's label goes and the node's label comes, by two watches in any order.
    assert_eq!(story.lose(VmiOrigin::Coming), NOTHING);
    assert_eq!(story.pass(LINGER / 2), NOTHING);
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), NOTHING);
    assert_eq!(story.pass(LINGER * 2), NOTHING);
}

#[test]
fn the_watch_of_arriving_vmis_puts_no_older_version_over_that_of_running_ones() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Coming, vmi(&["p"]));
    story.found("p");
    let renamed = || vmi_with(|vmi| vmi["spec"]["hostname"] = "new".into());
    assert_eq!(story.apply(VmiOrigin::Here, renamed()), ["+shop/web 102"]);
    assert_eq!(story.apply(VmiOrigin::Coming, vmi(&["p"])), NOTHING);
    assert_eq!(story.core.vmis().next().and_then(|vmi| vmi.spec.hostname.as_deref()), Some("new"));
    // It names the VMI all the same.
    assert_eq!(story.lose(VmiOrigin::Here), NOTHING);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.core.vmis().count(), 1);
    assert_eq!(story.apply(VmiOrigin::Coming, next_vmi("q")), ["watch q"], "another VMI of that name");
}

#[test]
fn a_failed_migration_ends_the_target() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Coming, vmi(&["p"]));
    story.found("p");
    assert_eq!(story.lose(VmiOrigin::Coming), NOTHING);
    assert_eq!(story.core.deadline(), Some(story.now + LINGER));
    assert_eq!(story.pass(LINGER), ["-shop/web", "leave p"]);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn a_vm_with_two_pods_here_has_two_records() {
    let mut story = Story::served();
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p", "a"])), ["watch a"]);
    assert_eq!(story.pod("a", PodEvent::Found(pod("a", 43))), ["+shop/web@a 102", "ImdsReady web"]);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["a"])), NOTHING, "the one that stays keeps its name");
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["a", "b"])), ["watch b"]);
    assert_eq!(story.pod("b", PodEvent::Found(pod("b", 44))), ["+shop/web 103", "ImdsReady web"]);
}

// Launchers and inlets: when a VM is served first, and what is reported until then.

#[test]
fn the_core_is_settled_once_the_search_for_each_launcher_has_a_result() {
    let mut story = Story::begin();
    assert!(story.core.is_settled(), "it knows no VMI");
    story.apply(VmiOrigin::Kept, vmi(&["a", "b"]));
    assert_eq!(story.pod("a", PodEvent::Absent), NOTHING);
    assert!(!story.core.is_settled(), "one of two launchers is unsearched");
    story.found("b");
    assert!(story.core.is_settled());
    assert!(story.core.awaits("shop/web"), "the other may appear");
}

fn missing() -> PodEvent {
    PodEvent::Missing { reason: "no listener".into() }
}

#[test]
fn a_missing_launcher_is_reported_until_it_is_found() {
    let mut story = Story::of(vmi(&["p"]));
    assert_eq!(story.pod("p", PodEvent::Absent), NOTHING, "it may still appear");
    story.now += GRACE;
    story.core.pod(&"p".parse().expect("a uid"), missing(), story.now);
    let actions = story.all_actions();
    let [Action::Publish(FeedEvent::Rejected { key, error }), Action::Report(report)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((&**key, report.reason), ("shop/web", EventReason::Degraded));
    for text in [&error.to_string(), &report.message] {
        assert!(text.contains("launcher of pod `p`") && text.contains("no listener"), "{text}");
    }
    assert!(story.core.is_settled() && story.core.awaits("shop/web"));
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), NOTHING, "published once");
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    assert_eq!(story.pass(GRACE), NOTHING);
}

#[test]
fn a_report_of_a_missing_launcher_ends_with_its_pod_or_an_unserved_vm() {
    let mut story = Story::of(vmi(&["p"]));
    story.now += GRACE;
    assert_eq!(story.pod("p", missing()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&[])), ["-shop/web", "leave p"]);
    // With its launcher found, the VM has no NIC that could be served.
    let without =
        vmi_with(|vmi| vmi["spec"]["domain"]["devices"]["interfaces"][0]["state"] = "absent".into());
    story.apply(VmiOrigin::Here, without);
    story.now += GRACE;
    assert_eq!(story.pod("p", missing()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.found("p"), ["-shop/web"]);
}

#[test]
fn a_pod_beyond_a_limit_is_reported_at_once() {
    let mut story = Story::of(vmi(&["p"]));
    story.core.unfollowed(&"p".parse().expect("a uid"), &PodsError::TooManyPods, story.now);
    assert_eq!(story.actions(), ["!shop/web", "ImdsDegraded web"]);
    assert!(story.core.is_settled());
}

#[test]
fn a_vmi_is_served_once_its_launcher_is_found() {
    let mut story = Story::begin();
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), ["watch p"]);
    assert!(!story.core.is_settled() && story.core.awaits("shop/web"));
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    assert!(story.core.is_settled() && !story.core.awaits("shop/web"));
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), NOTHING, "nothing new");
    let renamed = vmi_with(|vmi| vmi["spec"]["hostname"] = "other".into());
    assert_eq!(story.apply(VmiOrigin::Here, renamed), ["+shop/web 102"]);
}

/// A pod on passt with these devices of an inlet.
fn on_passt(ends: &[&str]) -> Pod {
    Pod { taps: Vec::new(), nics: ends.iter().map(|name| nic(name, [0; 6])).collect(), ..pod("p", 42) }
}

fn vmi_on_passt() -> Value {
    vmi_on(json!({"name": "default", "passtBinding": {}, "macAddress": "02:00:00:00:00:01"}))
}

#[test]
fn a_vmi_on_passt_is_served_by_its_inlet_which_is_restored_when_lost() {
    let mut story = Story::with(KubevirtOptions { passt: Passt::Listen, ..KubevirtOptions::default() });
    story.apply(VmiOrigin::Here, vmi_on_passt());
    let asks = "inlet p 02:00:00:00:00:01";
    assert_eq!(story.pod("p", PodEvent::Found(on_passt(&[]))), [asks]);
    assert!(!story.core.is_settled() && story.core.awaits("shop/web"));
    let ready = on_passt(&[inlet::POD_END, inlet::PORT]);
    assert_eq!(story.pod("p", PodEvent::Taps(ready)), ["+shop/web 101", "ImdsReady web"]);
    assert!(story.core.is_settled() && !story.core.awaits("shop/web"));
    assert_eq!(story.apply(VmiOrigin::Here, vmi_on_passt()), NOTHING, "nothing new");
    assert_eq!(story.pod("p", PodEvent::Taps(on_passt(&[]))), [asks, "watch p"], "it was deleted");
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn an_inlet_that_stays_unready_is_reported_after_the_grace_period() {
    let mut story = Story::with(KubevirtOptions { passt: Passt::Listen, ..KubevirtOptions::default() });
    story.apply(VmiOrigin::Here, vmi_on_passt());
    story.pod("p", PodEvent::Found(on_passt(&[])));
    assert_eq!(story.pass(GRACE), ["!shop/web", "ImdsDegraded web"]);
}

#[test]
fn an_unwanted_inlet_of_a_pod_is_removed() {
    let mut story = Story::of(vmi_on_passt());
    let left = PodEvent::Found(on_passt(&[inlet::POD_END]));
    assert_eq!(story.pod("p", left), ["inlet p none", "!shop/web", "ImdsDegraded web"]);
    assert!(story.core.is_settled());
}

/// The reports on how the agent serves the VM now.
fn serve(story: &mut Story, service: ServingState) -> Vec<(EventReason, String)> {
    story.core.served([("shop/web".to_owned(), service)].into(), story.now);
    reports(story)
}

fn reports(story: &mut Story) -> Vec<(EventReason, String)> {
    let reports = story.all_actions().into_iter().filter_map(|action| match action {
        Action::Report(report) => Some((report.reason, report.message)),
        _ => None,
    });
    reports.collect()
}

#[test]
fn a_vm_is_reported_as_ready_once_the_agent_serves_it_and_not_before() {
    let Story { core, now, disk } = Story::begin();
    let mut story = Story { core: core.told_of_services(), now, disk };
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    assert_eq!(story.found("p"), ["+shop/web 101"], "a record is not a served port");
    let is = |reason, text: &str| vec![(reason, text.to_owned())];
    let ready = is(EventReason::Ready, "the VM's metadata is served on 1 of its NICs");
    assert_eq!(serve(&mut story, ServingState::Waiting), []);
    assert_eq!(serve(&mut story, ServingState::Ready), ready);
    assert_eq!(serve(&mut story, ServingState::Mismatched("a, b".into())), is(EventReason::Degraded, "a, b"));
    assert_eq!(serve(&mut story, ServingState::Ready), ready);
    // A failure that passes soon is none.
    assert_eq!(serve(&mut story, ServingState::Failed("no".into())), []);
    assert_eq!(serve(&mut story, ServingState::Ready), []);
    assert_eq!(serve(&mut story, ServingState::Failed("no".into())), []);
    assert_eq!(story.core.deadline(), Some(story.now + GRACE));
    story.now += GRACE;
    story.core.tick(story.now);
    assert_eq!(reports(&mut story), is(EventReason::Degraded, "no"));
    assert_eq!(serve(&mut story, ServingState::Ready), ready);
}

#[test]
fn a_vm_whose_state_changes_all_the_time_has_few_reports_and_then_the_latest() {
    let Story { core, now, disk } = Story::begin();
    let mut story = Story { core: core.told_of_services(), now, disk };
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    story.found("p");
    let flap = |story: &mut Story| {
        let states = (0..50).flat_map(|n| [ServingState::Ready, ServingState::Mismatched(n.to_string())]);
        states.flat_map(|state| serve(story, state)).count()
    };
    assert_eq!(flap(&mut story), REPORTS_AT_ONCE as usize);
    assert_eq!(story.core.deadline(), Some(story.now + REPORT_EVERY));
    story.now += REPORT_EVERY;
    story.core.tick(story.now);
    assert_eq!(reports(&mut story), [(EventReason::Degraded, "49".to_owned())]);
    assert_eq!(flap(&mut story), 0);
    story.now += REPORT_EVERY * 2;
    assert_eq!(flap(&mut story), 2);
}

#[test]
fn a_renamed_nic_of_a_pod_keeps_its_mac_for_a_while() {
    let mut story = Story::begin();
    let bridged = vmi_on(json!({"name": "default", "bridge": {}}));
    story.apply(VmiOrigin::Here, bridged);
    let shown = |nics: &[(&str, u8)]| Pod {
        nics: nics.iter().map(|(name, last)| nic(name, [2, 0, 0, 0, 0, *last])).collect(),
        ..pod("p", 42)
    };
    assert_eq!(story.pod("p", PodEvent::Found(shown(&[("eth0", 1)]))), ["+shop/web 101", "ImdsReady web"]);
    // A busy node: the grace of a new pod is over before KubeVirt sets up its network.
    story.pass(GRACE * 2);
    assert_eq!(story.pod("p", PodEvent::Taps(shown(&[("eth0-nic", 9)]))), NOTHING, "renamed");
    assert_eq!(story.pass(NIC_KEPT / 2), NOTHING);
    let both = shown(&[("eth0-nic", 9), ("eth0", 1)]);
    assert_eq!(story.pod("p", PodEvent::Taps(both)), NOTHING, "another stands in for it");
    assert_eq!(story.pass(NIC_KEPT * 2), NOTHING);
    // One that stays away is reported in the end; its record stays.
    assert_eq!(story.pod("p", PodEvent::Taps(shown(&[("eth0-nic", 9)]))), NOTHING);
    assert_eq!(story.pass(NIC_KEPT), ["watch p", "!shop/web", "ImdsDegraded web"]);
    // A NIC whose MAC changes has the new one.
    let actions = story.pod("p", PodEvent::Taps(shown(&[("eth0", 2)])));
    assert_eq!(actions, ["+shop/web 102", "ImdsReady web"], "the record takes the refusal back");
}

// Secrets, NICs and memory: what a record needs beside the VMI.

#[test]
fn a_late_secret_is_awaited_and_reported_after_the_grace_period() {
    let mut story = Story::of(secretive(&["p"]));
    assert_eq!(story.found("p"), ["?shop/web 1"]);
    assert_eq!(story.pod("p", PodEvent::Taps(pod("p", 42))), NOTHING);
    assert_eq!(story.pass(GRACE), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.pass(GRACE), NOTHING, "once");
    story.put("p", "ci-udata", "userdata", "#one\n");
    let files = || PodEvent::Files { volume: "ci-udata".into() };
    assert_eq!(story.pod("p", files()), ["+shop/web 101", "ImdsReady web"]);
    story.put("p", "ci-udata", "userdata", "#two\n");
    assert_eq!(story.pod("p", files()), ["+shop/web 102"]);
    // kubelet removes the volumes first: the good record stays.
    story.disk.lock().expect("no panic").clear();
    assert_eq!(story.pod("p", files()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn a_vms_volumes_are_watched_before_they_exist() {
    let mut story = Story::of(secretive(&["p"]));
    let mut watched = |vmi: Option<Value>| {
        match vmi {
            Some(vmi) => story.core.applied(VmiOrigin::Here, Vmi::from_value(vmi).expect("a VMI"), story.now),
            None => story.core.pod(&"p".parse().expect("a uid"), PodEvent::Found(pod("p", 42)), story.now),
        }
        story.translate();
        let volumes = story.core.actions().into_iter().find_map(|action| match action {
            Action::Watch(_, volumes) => Some(volumes.into_iter().collect::<Vec<_>>()),
            _ => None,
        });
        volumes.unwrap_or_default()
    };
    assert_eq!(watched(None), ["ci-udata", "imds-token"]);
    assert_eq!(watched(Some(secretive(&["p"]))), NOTHING, "as before");
    let mut annotated = secretive(&["p"]);
    annotated["metadata"]["annotations"] = json!({"imds.kubevirt.io/user-data-secret": "s"});
    assert_eq!(watched(Some(annotated)), ["imds-token", "imds-user-data"]);
}

#[test]
fn expected_identities_are_withdrawn_when_the_pod_ends() {
    let mut story = Story::of(secretive(&["p"]));
    story.found("p");
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn a_hot_plugged_nic_is_served_and_an_unplugged_one_is_not() {
    let mut story = Story::served();
    let mut more = vmi(&["p"]);
    let nic = json!({"name": "red", "bridge": {}, "macAddress": "02:00:00:00:00:02"});
    more["spec"]["domain"]["devices"]["interfaces"].as_array_mut().expect("NICs").push(nic);
    more["spec"]["networks"] =
        json!([{"name": "default", "pod": {}}, {"name": "red", "multus": {"networkName": "r"}}]);
    let nics = |story: &mut Story| {
        story.all_actions().into_iter().find_map(|action| match action {
            Action::Publish(FeedEvent::Upsert { record, .. }) => Some(record.network.nics.len()),
            _ => None,
        })
    };
    story.core.applied(VmiOrigin::Here, Vmi::from_value(more.clone()).expect("a VMI"), story.now);
    assert_eq!(nics(&mut story), Some(2));
    more["spec"]["domain"]["devices"]["interfaces"][1]["state"] = "absent".into();
    story.core.applied(VmiOrigin::Here, Vmi::from_value(more).expect("a VMI"), story.now);
    assert_eq!(nics(&mut story), Some(1));
}

#[test]
fn an_unserved_binding_is_reported_at_once_by_name_and_not_awaited() {
    let mut story = Story::begin();
    let sriov = vmi_on(json!({"name": "fast", "sriov": {}}));
    story.apply(VmiOrigin::Here, sriov);
    story.core.pod(&"p".parse().expect("a uid"), PodEvent::Found(pod("p", 42)), story.now);
    let actions = story.all_actions();
    let [Action::Publish(FeedEvent::Rejected { error, .. }), Action::Report(report)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(error.to_string().contains("`sriov`") && report.message.contains("`fast`"), "{error}");
    assert_eq!(report.reason, EventReason::Degraded);
    assert!(!story.core.awaits("shop/web") && !story.core.awaits("shop/other"));
}

/// A VMI on masquerade, which is served, with these further NICs and this data.
fn vmi_beside(nics: &[Value], cloud_init: Value) -> Value {
    vmi_with(|vmi| {
        vmi["spec"]["domain"]["devices"]["interfaces"].as_array_mut().expect("NICs").extend_from_slice(nics);
        vmi["spec"]["volumes"] = json!([{"name": "ci", "cloudInitNoCloud": cloud_init}]);
    })
}

#[test]
fn a_vm_that_is_served_in_part_stays_rejected_until_its_fault_is_gone() {
    let fast = [json!({"name": "fast", "sriov": {}})];
    let evil = json!({"instance-id": "evil"});
    for (nics, metadata) in [(&fast[..], json!({})), (&fast[..0], evil.clone()), (&fast[..], evil)] {
        let faulty = |text: &str| vmi_beside(nics, json!({"userData": text, "metaData": metadata.clone()}));
        let mut story = Story::of(faulty("#one\n"));
        assert_eq!(story.found("p"), ["+shop/web 101", "!shop/web", "ImdsDegraded web"]);
        // The event of the VMI is still true, so it is not repeated.
        assert_eq!(story.apply(VmiOrigin::Here, faulty("#two\n")), ["+shop/web 102", "!shop/web"]);
        assert_eq!(story.apply(VmiOrigin::Here, faulty("#three\n")), ["+shop/web 103", "!shop/web"]);
        let mut labelled = faulty("#three\n");
        labelled["metadata"]["labels"] = json!({"a": "b"});
        assert_eq!(story.apply(VmiOrigin::Here, labelled), NOTHING, "the record is as it was");
        let whole = vmi_beside(&[], json!({"userData": "#four\n"}));
        assert_eq!(story.apply(VmiOrigin::Here, whole), ["+shop/web 104", "ImdsReady web"]);
        assert_eq!(story.apply(VmiOrigin::Here, faulty("#four\n")), ["!shop/web", "ImdsDegraded web"]);
        let whole = vmi_beside(&[], json!({"userData": "#four\n"}));
        assert_eq!(story.apply(VmiOrigin::Here, whole), ["+shop/web 104", "ImdsReady web"]);
    }
}

#[test]
fn a_rejection_says_whether_the_latest_record_is_in_force() {
    /// Whether each rejection of the story's last step is about a part of the VM.
    fn about_parts(story: &mut Story, vmi: Value) -> Vec<bool> {
        story.core.applied(VmiOrigin::Here, Vmi::from_value(vmi).expect("a VMI"), story.now);
        let rejections = story.all_actions().into_iter().filter_map(|action| match action {
            Action::Publish(FeedEvent::Rejected { error, .. }) => {
                assert!(error.to_string().contains("`sriov`"), "{error}");
                Some(matches!(error, FeedError::Part { .. }))
            }
            _ => None,
        });
        rejections.collect()
    }
    let fast = json!({"name": "fast", "sriov": {}});
    let beside = |text: &str| vmi_beside(std::slice::from_ref(&fast), json!({"userData": text}));
    let mut story = Story::served();
    assert_eq!(about_parts(&mut story, beside("#one\n")), [true]);
    assert_eq!(about_parts(&mut story, beside("#two\n")), [true], "with each record");
    let mut none_served = beside("#three\n");
    none_served["spec"]["domain"]["devices"]["interfaces"][0]["state"] = "absent".into();
    assert_eq!(about_parts(&mut story, none_served), [false], "the record before stays");
    assert_eq!(about_parts(&mut story, beside("#four\n")), [true]);
    let mut story = Story::of(vmi_on(fast.clone()));
    story.core.pod(&"p".parse().expect("a uid"), PodEvent::Found(pod("p", 42)), story.now);
    assert_eq!(about_parts(&mut story, vmi_on(fast.clone())), [false], "there is no record");
}

#[test]
fn a_vm_without_memory_is_reported_and_served_once_memory_is_free() {
    const LARGE: usize = 50_000;
    let mut story = Story::begin();
    let room = MemoryBudget::new(330_000);
    let id = |key: &str| RecordId::new(RecordSource::Kubevirt, key);
    let other = RecordId::new(RecordSource::Api, "other");
    let taking = Arc::clone(&room);
    story.core = story.core.admitting(Box::new(move |key, record: &Record| taking.take(&id(key), record)));
    story.put("p", "ci-udata", "userdata", "small");
    story.apply(VmiOrigin::Here, secretive(&["p"]));
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    let small = room.usage().used;
    let record = story.core.vmis["shop/web"].instances.values().find_map(|one| one.record.clone());
    let mut hoarder = (*record.expect("a record")).clone();
    hoarder.user_data = Some(bytes::Bytes::from(vec![b'x'; LARGE]).into());
    room.take(&other, &hoarder).expect("room");
    // A larger version is refused, the small one stays, and the refusal is published once.
    story.put("p", "ci-udata", "userdata", &"y".repeat(LARGE));
    let files = || PodEvent::Files { volume: "ci-udata".into() };
    assert_eq!(story.pod("p", files()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.pod("p", files()), NOTHING);
    assert_eq!(room.usage().refusals, 2);
    room.give_back(&other);
    assert_eq!(room.usage().used, small, "the small version is still counted");
    story.core.freed(|tenant| room.free_for(tenant), story.now);
    assert_eq!(story.actions(), ["+shop/web 102", "ImdsReady web"]);
    room.give_back(&id("shop/web"));
    assert_eq!(room.usage().used, 0);
}

#[test]
fn a_patch_loop_costs_one_translation_per_pause_and_delays_no_other_namespace() {
    let mut story = Story::begin();
    let patched = |namespace: &str, name: &str, text: &str| {
        let mut vmi = vmi(&[&format!("{namespace}-{name}")]);
        vmi["metadata"]["namespace"] = namespace.into();
        vmi["metadata"]["name"] = name.into();
        vmi["metadata"]["annotations"] = json!({"imds.kubevirt.io/user-data": text});
        Vmi::from_value(vmi).expect("a VMI")
    };
    let apply = |story: &mut Story, namespace: &str, name: &str, text: &str| {
        story.core.applied(VmiOrigin::Here, patched(namespace, name, text), story.now);
        let uid = format!("{namespace}-{name}");
        story.core.pod(&uid.parse().expect("a uid"), PodEvent::Found(pod(&uid, 42)), story.now);
    };
    let mut translations = 0;
    for n in 0..200 {
        for name in ["one", "two"] {
            apply(&mut story, "hostile", name, &n.to_string());
        }
        while let Some(job) = story.core.next_job(story.now) {
            translations += 1;
            story.core.translated(job.run(), story.now);
        }
    }
    assert_eq!(translations, 2, "400 patches within a pause");
    // Many VMIs of the hostile namespace wait, and a modest one comes last.
    for n in 0..100 {
        apply(&mut story, "hostile", &format!("vm-{n}"), "x");
    }
    apply(&mut story, "modest", "vm", "y");
    let keys = std::iter::from_fn(|| {
        let job = story.core.next_job(story.now)?;
        let key = job.key.clone();
        story.core.translated(job.run(), story.now);
        Some(key)
    });
    let keys: Vec<_> = keys.collect();
    assert!(keys.iter().position(|key| key == "modest/vm").is_some_and(|at| at <= 1), "{:?}", &keys[..3]);
}
