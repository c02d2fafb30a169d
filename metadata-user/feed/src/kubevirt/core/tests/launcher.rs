//! Launchers and inlets: when a VM is served first, and what is reported until then.

use serde_json::{Value, json};

use super::{NOTHING, Story, pod, vmi};
use crate::FeedEvent;
use crate::kubevirt::core::{Action, EventReason, GRACE, NIC_KEPT, VmiOrigin};
use crate::kubevirt::{KubevirtOptions, Passt};
use crate::pods::{Pod, PodEvent, PodNic, PodsError};
use crate::source::ServingState;
use metadata_links::inlet;

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
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    assert_eq!(story.pod("p", PodEvent::Absent), NOTHING, "it may still appear");
    story.now += GRACE;
    story.core.pod(&"p".parse().expect("a uid"), missing(), story.now);
    story.translate();
    let actions = story.core.actions();
    let [Action::Publish(FeedEvent::Rejected { key, error }), Action::Report(report)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((&**key, report.reason), ("shop/web", EventReason::Degraded));
    for text in [&error.to_string(), &report.message] {
        assert!(text.contains("launcher of pod `p`") && text.contains("no listener"), "{text}");
    }
    assert!(story.core.is_settled() && story.core.awaits("shop/web"));
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), NOTHING, "published once");
    assert_eq!(story.found("p"), ["+shop/web 101", "+shop/web 101", "ImdsReady web"]);
    assert_eq!(story.pass(GRACE), NOTHING);
}

#[test]
fn a_report_of_a_missing_launcher_ends_with_its_pod_or_an_unserved_vm() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    story.now += GRACE;
    assert_eq!(story.pod("p", missing()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&[])), ["-shop/web", "leave p"]);
    // With its launcher found, the VM has no NIC that could be served.
    let mut without = vmi(&["p"]);
    without["spec"]["domain"]["devices"]["interfaces"][0]["state"] = "absent".into();
    story.apply(VmiOrigin::Here, without);
    story.now += GRACE;
    assert_eq!(story.pod("p", missing()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.found("p"), ["-shop/web"]);
}

#[test]
fn a_pod_beyond_a_limit_is_reported_at_once() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi(&["p"]));
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
    let mut renamed = vmi(&["p"]);
    renamed["spec"]["hostname"] = "other".into();
    assert_eq!(story.apply(VmiOrigin::Here, renamed), ["+shop/web 102"]);
}

/// A pod on passt with these devices of an inlet.
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
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi_on_passt());
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
    story.translate();
    let reports = story.core.actions().into_iter().filter_map(|action| match action {
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
fn a_renamed_nic_of_a_pod_keeps_its_mac_for_a_while() {
    let mut story = Story::begin();
    let mut bridged = vmi(&["p"]);
    bridged["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "bridge": {}}]);
    story.apply(VmiOrigin::Here, bridged);
    let shown = |nics: &[(&str, u8)]| {
        let nic = |(name, last): &(&str, u8)| PodNic {
            name: (*name).into(),
            kind: "veth".into(),
            mac: metadata_common::mac::Mac([2, 0, 0, 0, 0, *last]),
        };
        Pod { nics: nics.iter().map(nic).collect(), ..pod("p", 42) }
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
    let ready = ["+shop/web 102", "+shop/web 102", "ImdsReady web"];
    assert_eq!(
        story.pod("p", PodEvent::Taps(shown(&[("eth0", 2)]))),
        ready,
        "the second one clears the refusal"
    );
}
