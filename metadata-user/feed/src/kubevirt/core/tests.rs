//! Stories: what happens to a VMI, and what the agent is told of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Action, Core, GRACE, LINGER, MAX_VMIS, Origin, Reason, VMIS_OCTETS};
use crate::FeedEvent;
use crate::kubevirt::translate::Files;
use crate::kubevirt::{Options, Passt, Vmi};
use crate::pods::{Pod, PodEvent, PodNic, PodsError, Tap, TapKind};
use crate::registry::RecordId;
use crate::room::Room;
use metadata_content::record::{Limits, Record};
use metadata_content::source::Source;
use metadata_links::inlet;

/// Volumes by pod and name.
type Disk = Arc<Mutex<BTreeMap<(String, String), Files>>>;

/// A core, the time, and the volumes of its pods.
struct Story {
    core: Core,
    now: Instant,
    disk: Disk,
}

fn vmi(pods: &[&str]) -> Value {
    let active: BTreeMap<_, _> = pods.iter().map(|uid| (*uid, "here")).collect();
    json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "b5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10"},
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

/// The same with user-data in a Secret.
fn secretive(pods: &[&str]) -> Value {
    let mut vmi = vmi(pods);
    vmi["spec"]["volumes"] = json!([{"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}]);
    vmi
}

fn named(name: &str) -> Value {
    let mut vmi = vmi(&["p"]);
    vmi["metadata"]["name"] = name.into();
    vmi
}

fn pod(uid: &str, pid: u32) -> Pod {
    Pod {
        uid: uid.parse().expect("a uid"),
        pid,
        netns: format!("/proc/{pid}/ns/net"),
        taps: vec![Tap {
            ifname: "tap0".into(),
            kind: TapKind::Tap,
            mac: metadata_common::mac::Mac::default(),
            queues: 1,
        }],
        nics: Vec::new(),
    }
}

impl Story {
    fn begin() -> Self {
        Self::with(Options::default())
    }

    fn with(options: Options) -> Self {
        let disk = Disk::default();
        let volumes = Arc::clone(&disk);
        let read = move |uid: &_, volume: &str| {
            let place = (format!("{uid}"), volume.to_owned());
            Ok(volumes.lock().expect("no panic").get(&place).cloned())
        };
        let core = Core::new("here".into(), options, Limits::DEFAULT, 100, Box::new(read));
        Self { core, now: Instant::now(), disk }
    }

    fn put(&self, uid: &str, volume: &str, file: &str, text: &str) {
        let files = Files::from([(file.to_owned(), text.to_owned().into())]);
        self.disk.lock().expect("no panic").insert((uid.into(), volume.into()), files);
    }

    fn apply(&mut self, origin: Origin, vmi: Value) -> Vec<String> {
        self.core.applied(origin, Vmi::from_value(vmi).expect("a VMI"), self.now);
        self.told()
    }

    fn lose(&mut self, origin: Origin) -> Vec<String> {
        self.core.gone(origin, "shop/web", self.now);
        self.told()
    }

    fn pod(&mut self, uid: &str, event: PodEvent) -> Vec<String> {
        self.core.pod(&uid.parse().expect("a uid"), event, self.now);
        self.told()
    }

    fn found(&mut self, uid: &str) -> Vec<String> {
        self.pod(uid, PodEvent::Found(pod(uid, 42)))
    }

    fn pass(&mut self, time: Duration) -> Vec<String> {
        self.now += time;
        self.core.tick(self.now);
        self.told()
    }

    /// Actions in few words. Which volumes are watched is a test of its own.
    fn told(&mut self) -> Vec<String> {
        let told = self.core.actions().into_iter();
        let told = told.filter(|action| !matches!(action, Action::Watch(_, volumes) if !volumes.is_empty()));
        let word = |action| match action {
            Action::Tell(FeedEvent::Upsert { key, record }) => format!("+{key} {}", record.generation),
            Action::Tell(FeedEvent::Expect { key, identities }) => format!("?{key} {}", identities.len()),
            Action::Tell(FeedEvent::Remove { key }) => format!("-{key}"),
            Action::Tell(FeedEvent::Rejected { key, .. }) => format!("!{key}"),
            Action::Tell(FeedEvent::Synced) => "synced".into(),
            Action::Watch(uid, _) => format!("watch {uid}"),
            Action::Inlet(uid, mac) => {
                format!("inlet {uid} {}", mac.map_or("none".into(), |mac| mac.to_string()))
            }
            Action::Leave(uid) => format!("leave {uid}"),
            Action::Report(report) => format!("{} {}", report.reason.as_str(), report.name),
        };
        told.map(word).collect()
    }
}

const NOTHING: [&str; 0] = [];

#[test]
fn everything_is_told_once_each_launcher_has_been_looked_for_whether_it_is_there_or_not() {
    let mut story = Story::begin();
    assert!(story.core.is_settled(), "there is none");
    story.apply(Origin::Kept, vmi(&["a", "b"]));
    assert_eq!(story.pod("a", PodEvent::Absent), NOTHING);
    assert!(!story.core.is_settled(), "of two one has not been looked for");
    story.found("b");
    assert!(story.core.is_settled());
    assert!(story.core.awaits("shop/web"), "the other may come");
}

fn missing() -> PodEvent {
    PodEvent::Missing { reason: "nobody listens there".into() }
}

#[test]
fn a_vmi_whose_launcher_is_missing_is_named_until_it_is_found() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    assert_eq!(story.pod("p", PodEvent::Absent), NOTHING, "it may come yet");
    story.now += GRACE;
    story.core.pod(&"p".parse().expect("a uid"), missing(), story.now);
    let actions = story.core.actions();
    let [Action::Tell(FeedEvent::Rejected { key, error }), Action::Report(report)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((&**key, report.reason), ("shop/web", Reason::Degraded));
    for text in [&error.to_string(), &report.message] {
        assert!(text.contains("launcher of pod `p`") && text.contains("nobody listens there"), "{text}");
    }
    assert!(story.core.is_settled() && story.core.awaits("shop/web"));
    assert_eq!(story.apply(Origin::Here, vmi(&["p"])), NOTHING, "once");
    assert_eq!(story.found("p"), ["+shop/web 101", "+shop/web 101", "ImdsReady web"]);
    assert_eq!(story.pass(GRACE), NOTHING);
}

#[test]
fn a_missing_launcher_is_forgotten_with_its_pod_and_with_a_vm_that_is_not_served() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    story.now += GRACE;
    assert_eq!(story.pod("p", missing()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.apply(Origin::Here, vmi(&[])), ["-shop/web", "leave p"]);
    // Found, the VM turns out to have no NIC that could be served.
    let mut without = vmi(&["p"]);
    without["spec"]["domain"]["devices"]["interfaces"][0]["state"] = "absent".into();
    story.apply(Origin::Here, without);
    story.now += GRACE;
    assert_eq!(story.pod("p", missing()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.found("p"), ["-shop/web"]);
}

#[test]
fn a_pod_that_cannot_be_followed_is_named_at_once() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    story.core.unfollowed(&"p".parse().expect("a uid"), &PodsError::TooManyPods, story.now);
    assert_eq!(story.told(), ["!shop/web", "ImdsDegraded web"]);
    assert!(story.core.is_settled());
}

#[test]
fn a_vmi_is_served_once_its_launcher_is_found() {
    let mut story = Story::begin();
    assert_eq!(story.apply(Origin::Here, vmi(&["p"])), ["watch p"]);
    assert!(!story.core.is_settled() && story.core.awaits("shop/web"));
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    assert!(story.core.is_settled() && !story.core.awaits("shop/web"));
    assert_eq!(story.apply(Origin::Here, vmi(&["p"])), NOTHING, "nothing new");
    let mut renamed = vmi(&["p"]);
    renamed["spec"]["hostname"] = "other".into();
    assert_eq!(story.apply(Origin::Here, renamed), ["+shop/web 102"]);
}

/// A pod on passt, with these devices of an inlet.
fn on_passt(ends: &[&str]) -> Pod {
    let nic = |name: &&str| PodNic {
        name: (*name).to_owned(),
        kind: "veth".into(),
        mac: metadata_common::mac::Mac::default(),
    };
    Pod { taps: Vec::new(), nics: ends.iter().map(nic).collect(), ..pod("p", 42) }
}

fn vmi_on_passt() -> Value {
    let mut vmi = vmi(&["p"]);
    vmi["spec"]["domain"]["devices"]["interfaces"] =
        json!([{"name": "default", "passtBinding": {}, "macAddress": "02:00:00:00:00:01"}]);
    vmi
}

#[test]
fn a_vmi_on_passt_is_served_once_its_inlet_is_ready_and_again_when_it_was_lost() {
    let mut story = Story::with(Options { passt: Passt::Listen, ..Options::default() });
    story.apply(Origin::Here, vmi_on_passt());
    let asks = "inlet p 02:00:00:00:00:01";
    assert_eq!(story.pod("p", PodEvent::Found(on_passt(&[]))), [asks]);
    assert!(!story.core.is_settled() && story.core.awaits("shop/web"));
    let ready = on_passt(&[inlet::POD_END, inlet::PORT]);
    assert_eq!(story.pod("p", PodEvent::Taps(ready)), ["+shop/web 101", "ImdsReady web"]);
    assert!(story.core.is_settled() && !story.core.awaits("shop/web"));
    assert_eq!(story.apply(Origin::Here, vmi_on_passt()), NOTHING, "nothing new");
    assert_eq!(story.pod("p", PodEvent::Taps(on_passt(&[]))), [asks, "watch p"], "it was deleted");
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn an_inlet_that_never_gets_ready_is_reported_after_a_while() {
    let mut story = Story::with(Options { passt: Passt::Listen, ..Options::default() });
    story.apply(Origin::Here, vmi_on_passt());
    story.pod("p", PodEvent::Found(on_passt(&[])));
    assert_eq!(story.pass(GRACE), ["!shop/web", "ImdsDegraded web"]);
}

#[test]
fn an_inlet_that_nobody_asks_for_any_more_is_taken_away() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi_on_passt());
    let left = PodEvent::Found(on_passt(&[inlet::POD_END]));
    assert_eq!(story.pod("p", left), ["inlet p none", "!shop/web", "ImdsDegraded web"]);
    assert!(story.core.is_settled());
}

#[test]
fn it_ends_with_its_launcher_and_does_not_come_back_by_an_old_word() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    story.found("p");
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.apply(Origin::Here, vmi(&["p"])), NOTHING);
    assert_eq!(story.found("p"), NOTHING);
    // A restart: the same name, another VMI and another pod.
    let mut next = vmi(&["q"]);
    next["metadata"]["uid"] = "c5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10".into();
    assert_eq!(story.apply(Origin::Here, next), ["watch q"]);
    assert_eq!(story.found("q"), ["+shop/web 102", "ImdsReady web"]);
}

#[test]
fn a_vmi_in_the_place_of_another_of_its_name_gets_nothing_of_it() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    story.found("p");
    let mut next = vmi(&["p"]);
    next["metadata"]["uid"] = "c5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10".into();
    assert_eq!(story.apply(Origin::Here, next), ["-shop/web", "leave p", "watch p"]);
}

#[test]
fn it_ends_with_its_last_phase_its_opt_out_and_its_pods_leaving() {
    let changes: [fn(&mut Value); 3] = [
        |vmi| vmi["status"]["phase"] = "Failed".into(),
        |vmi| vmi["metadata"]["annotations"] = json!({"imds.kubevirt.io/enabled": "false"}),
        |vmi| vmi["status"]["activePods"] = json!({"p": "elsewhere"}),
    ];
    for change in changes {
        let mut story = Story::begin();
        story.apply(Origin::Here, vmi(&["p"]));
        story.found("p");
        let mut changed = vmi(&["p"]);
        change(&mut changed);
        assert_eq!(story.apply(Origin::Here, changed), ["-shop/web", "leave p"]);
    }
}

#[test]
fn a_deleted_vmi_without_a_launcher_goes_at_once_and_with_one_when_that_ends() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    assert_eq!(story.lose(Origin::Here), ["leave p"]);
    story.apply(Origin::Here, vmi(&["p"]));
    story.found("p");
    assert_eq!(story.lose(Origin::Here), NOTHING);
    assert_eq!(story.pass(LINGER * 100), NOTHING);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn the_source_of_a_migration_serves_until_its_launcher_ends() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    story.found("p");
    let mut migrating = vmi(&["p"]);
    migrating["status"]["activePods"]["z"] = "elsewhere".into();
    assert_eq!(story.apply(Origin::Here, migrating), NOTHING);
    // nodeName says elsewhere now, which a watch by that label tells as a deletion.
    assert_eq!(story.lose(Origin::Here), NOTHING);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn the_target_of_a_migration_stands_by_before_it_runs_and_serves_on_after() {
    let mut story = Story::begin();
    assert_eq!(story.apply(Origin::Coming, vmi(&["p"])), ["watch p"]);
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    // The label of the target goes and that of the node comes, by two watches in any order.
    assert_eq!(story.lose(Origin::Coming), NOTHING);
    assert_eq!(story.pass(LINGER / 2), NOTHING);
    assert_eq!(story.apply(Origin::Here, vmi(&["p"])), NOTHING);
    assert_eq!(story.pass(LINGER * 2), NOTHING);
}

#[test]
fn a_failed_migration_takes_its_standby_along() {
    let mut story = Story::begin();
    story.apply(Origin::Coming, vmi(&["p"]));
    story.found("p");
    assert_eq!(story.lose(Origin::Coming), NOTHING);
    assert_eq!(story.core.deadline(), Some(story.now + LINGER));
    assert_eq!(story.pass(LINGER), ["-shop/web", "leave p"]);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn a_vm_that_is_here_twice_has_two_records() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    story.found("p");
    assert_eq!(story.apply(Origin::Coming, vmi(&["p", "a"])), ["watch a"]);
    assert_eq!(story.pod("a", PodEvent::Found(pod("a", 43))), ["+shop/web@a 102", "ImdsReady web"]);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.apply(Origin::Here, vmi(&["a"])), NOTHING, "the one that stays keeps its name");
    assert_eq!(story.apply(Origin::Here, vmi(&["a", "b"])), ["watch b"]);
    assert_eq!(story.pod("b", PodEvent::Found(pod("b", 44))), ["+shop/web 103", "ImdsReady web"]);
}

#[test]
fn a_late_secret_is_waited_for_and_told_of_after_a_while() {
    let mut story = Story::begin();
    story.apply(Origin::Here, secretive(&["p"]));
    assert_eq!(story.found("p"), ["?shop/web 1"]);
    assert_eq!(story.pod("p", PodEvent::Taps(pod("p", 42))), NOTHING);
    assert_eq!(story.pass(GRACE), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.pass(GRACE), NOTHING, "once");
    story.put("p", "ci-udata", "userdata", "#one\n");
    let files = || PodEvent::Files { volume: "ci-udata".into() };
    assert_eq!(story.pod("p", files()), ["+shop/web 101", "+shop/web 101", "ImdsReady web"]);
    story.put("p", "ci-udata", "userdata", "#two\n");
    assert_eq!(story.pod("p", files()), ["+shop/web 102"]);
    // The pod is being taken apart: what was good stays.
    story.disk.lock().expect("no panic").clear();
    assert_eq!(story.pod("p", files()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn the_volumes_a_vm_needs_are_watched_whether_they_are_there_or_not() {
    let mut story = Story::begin();
    story.apply(Origin::Here, secretive(&["p"]));
    let mut watched = |vmi: Option<Value>| {
        match vmi {
            Some(vmi) => story.core.applied(Origin::Here, Vmi::from_value(vmi).expect("a VMI"), story.now),
            None => story.core.pod(&"p".parse().expect("a uid"), PodEvent::Found(pod("p", 42)), story.now),
        }
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
fn what_was_expected_and_never_came_is_taken_back() {
    let mut story = Story::begin();
    story.apply(Origin::Here, secretive(&["p"]));
    story.found("p");
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn a_nic_that_is_plugged_in_is_served_and_one_that_is_pulled_is_not() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    story.found("p");
    let mut more = vmi(&["p"]);
    let nic = json!({"name": "red", "bridge": {}, "macAddress": "02:00:00:00:00:02"});
    more["spec"]["domain"]["devices"]["interfaces"].as_array_mut().expect("NICs").push(nic);
    more["spec"]["networks"] =
        json!([{"name": "default", "pod": {}}, {"name": "red", "multus": {"networkName": "r"}}]);
    let nics = |story: &mut Story| {
        let told = story.core.actions();
        told.into_iter().find_map(|action| match action {
            Action::Tell(FeedEvent::Upsert { record, .. }) => Some(record.network.nics.len()),
            _ => None,
        })
    };
    story.core.applied(Origin::Here, Vmi::from_value(more.clone()).expect("a VMI"), story.now);
    assert_eq!(nics(&mut story), Some(2));
    more["spec"]["domain"]["devices"]["interfaces"][1]["state"] = "absent".into();
    story.core.applied(Origin::Here, Vmi::from_value(more).expect("a VMI"), story.now);
    assert_eq!(nics(&mut story), Some(1));
}

#[test]
fn a_binding_that_is_not_served_is_told_of_at_once_and_by_name() {
    let mut story = Story::begin();
    let mut sriov = vmi(&["p"]);
    sriov["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "fast", "sriov": {}}]);
    story.apply(Origin::Here, sriov);
    story.core.pod(&"p".parse().expect("a uid"), PodEvent::Found(pod("p", 42)), story.now);
    let actions = story.core.actions();
    let [Action::Tell(FeedEvent::Rejected { error, .. }), Action::Report(report)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(error.to_string().contains("`sriov`") && report.message.contains("`fast`"), "{error}");
    assert_eq!(report.reason, Reason::Degraded);
}

#[test]
fn a_list_takes_away_what_it_does_not_name_and_only_of_its_own_watch() {
    let mut story = Story::begin();
    for (origin, name) in
        [(Origin::Here, "a"), (Origin::Here, "b"), (Origin::Coming, "c"), (Origin::Kept, "d")]
    {
        let mut vmi = named(name);
        vmi["status"]["activePods"] = json!({name: "here"});
        story.apply(origin, vmi);
    }
    let keys = BTreeSet::from(["shop/b".to_owned()]);
    story.core.listed(Origin::Here, &keys, story.now);
    assert_eq!(story.told(), ["leave a"]);
    story.core.listed(Origin::Kept, &BTreeSet::new(), story.now);
    assert_eq!(story.told(), ["leave d"]);
    assert_eq!(story.core.vmis().map(Vmi::key).collect::<Vec<_>>(), ["shop/b", "shop/c"]);
}

#[test]
fn what_was_kept_is_served_until_the_api_says_more() {
    let mut story = Story::begin();
    assert_eq!(story.apply(Origin::Kept, vmi(&["p"])), ["watch p"]);
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    let mut changed = vmi(&["p"]);
    changed["spec"]["hostname"] = "other".into();
    assert_eq!(story.apply(Origin::Here, changed.clone()), ["+shop/web 102"]);
    assert_eq!(story.apply(Origin::Kept, vmi(&["p"])), NOTHING, "what is kept is older");
    story.core.listed(Origin::Kept, &BTreeSet::new(), story.now);
    assert_eq!(story.told(), NOTHING);
}

#[test]
fn the_hooks_word_is_enough_and_ends_with_the_launcher() {
    let mut story = Story::begin();
    assert_eq!(story.apply(Origin::Hook, secretive(&["p"])), ["watch p"]);
    assert_eq!(story.apply(Origin::Hook, secretive(&["p"])), NOTHING, "it may come again");
    story.found("p");
    assert!(story.core.awaits("shop/web"), "its Secret is late");
    story.put("p", "ci-udata", "userdata", "#one\n");
    story.pod("p", PodEvent::Files { volume: "ci-udata".into() });
    assert!(!story.core.awaits("shop/web"));
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn the_hooks_word_does_not_outlast_or_replace_a_watchs() {
    let mut story = Story::begin();
    story.apply(Origin::Hook, vmi(&["p"]));
    assert_eq!(story.apply(Origin::Here, vmi(&["p"])), NOTHING);
    story.found("p");
    let mut old = vmi(&["p"]);
    old["spec"]["hostname"] = "old".into();
    assert_eq!(story.apply(Origin::Hook, old), NOTHING);
    story.pod("p", PodEvent::Gone);
    story.lose(Origin::Here);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn a_vmi_that_is_not_served_here_is_not_waited_for() {
    let mut story = Story::begin();
    let mut sriov = vmi(&["p"]);
    sriov["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "fast", "sriov": {}}]);
    story.apply(Origin::Hook, sriov);
    story.found("p");
    assert!(!story.core.awaits("shop/web") && !story.core.awaits("shop/other"));
}

#[test]
fn vmis_and_pods_beyond_the_limits_are_refused() {
    let mut story = Story::begin();
    for n in 0..MAX_VMIS {
        let mut vmi = named(&format!("v{n}"));
        vmi["status"]["activePods"] = json!({});
        assert_eq!(story.apply(Origin::Here, vmi), NOTHING);
    }
    assert_eq!(story.apply(Origin::Here, named("more")), ["!shop/more"]);
    let mut story = Story::begin();
    assert_eq!(story.apply(Origin::Here, vmi(&["a", "b", "c", "d", "e"])).len(), 4);
}

#[test]
fn a_vmi_that_cannot_be_read_leaves_what_was_told() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    story.found("p");
    let error = Vmi::read(b"[]").expect_err("no VMI");
    story.core.unreadable("shop/web", &error);
    assert_eq!(story.told(), ["!shop/web"]);
    story.core.gone(Origin::Here, "shop/other", story.now);
    assert_eq!(story.told(), ["-shop/other"], "one that was never read");
    assert_eq!(story.apply(Origin::Here, vmi(&["p"])), NOTHING);
}

#[test]
fn a_vm_without_memory_is_reported_and_served_once_there_is_room() {
    const LARGE: usize = 50_000;
    let mut story = Story::begin();
    let room = Room::new(330_000);
    let (id, other) = (RecordId::new(Source::Kubevirt, "shop/web"), RecordId::new(Source::Api, "other"));
    let taking = Arc::clone(&room);
    let admit = move |key: &str, record: &Record| taking.take(&RecordId::new(Source::Kubevirt, key), record);
    story.core = story.core.admitting(Box::new(admit));
    story.put("p", "ci-udata", "userdata", "small");
    story.apply(Origin::Here, secretive(&["p"]));
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    let small = room.usage().used;
    let Some(record) = story.core.vmis["shop/web"].instances.values().find_map(|i| i.record.clone()) else {
        panic!("there is a record")
    };
    let mut hoarder = (*record).clone();
    hoarder.user_data = Some(bytes::Bytes::from(vec![b'x'; LARGE]).into());
    room.take(&other, &hoarder).expect("room");
    // A larger version is refused; the small one stays, and nothing is said twice.
    story.put("p", "ci-udata", "userdata", &"y".repeat(LARGE));
    let files = || PodEvent::Files { volume: "ci-udata".into() };
    assert_eq!(story.pod("p", files()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.pod("p", files()), NOTHING);
    assert_eq!(room.usage().refusals, 2);
    room.give_back(&other);
    assert_eq!(room.usage().used, small, "the small version is still counted");
    story.core.freed(room.free(), story.now);
    // The second says that there is no complaint any more.
    assert_eq!(story.told(), ["+shop/web 102", "+shop/web 102", "ImdsReady web"]);
    room.give_back(&id);
    assert_eq!(room.usage().used, 0);
}

#[test]
fn vmis_beyond_their_octets_are_refused_and_those_known_stay() {
    let mut story = Story::begin();
    let sized = |name: &str, octets: usize| {
        let mut vmi = named(name);
        vmi["metadata"]["annotations"] = json!({"imds.kubevirt.io/user-data": "x".repeat(octets)});
        vmi
    };
    assert_eq!(story.apply(Origin::Here, sized("a", VMIS_OCTETS / 2)), ["watch p"]);
    assert_eq!(story.apply(Origin::Here, sized("b", VMIS_OCTETS / 2)), ["!shop/b"]);
    assert_eq!(story.apply(Origin::Here, sized("a", VMIS_OCTETS)), ["!shop/a"]);
    assert_eq!(story.core.vmis.len(), 1);
    assert_eq!(story.apply(Origin::Here, sized("a", 10)), NOTHING);
    story.core.gone(Origin::Here, "shop/a", story.now);
    assert_eq!(story.core.octets, 0);
}
