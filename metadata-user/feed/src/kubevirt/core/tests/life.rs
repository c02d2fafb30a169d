//! The end of a VM, and its migration.

use serde_json::{Value, json};

use super::{NOTHING, Story, pod, vmi};
use crate::kubevirt::core::{LINGER, VmiOrigin};
use crate::pods::PodEvent;

#[test]
fn a_vm_ends_with_its_launcher_and_stays_ended_on_old_events() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    story.found("p");
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), NOTHING);
    assert_eq!(story.found("p"), NOTHING);
    // A restart: the same name, another VMI and another pod.
    let mut next = vmi(&["q"]);
    next["metadata"]["uid"] = "c5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10".into();
    assert_eq!(story.apply(VmiOrigin::Here, next), ["watch q"]);
    assert_eq!(story.found("q"), ["+shop/web 102", "ImdsReady web"]);
}

#[test]
fn a_new_vmi_of_the_same_name_inherits_nothing() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    story.found("p");
    let mut next = vmi(&["p"]);
    next["metadata"]["uid"] = "c5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10".into();
    assert_eq!(story.apply(VmiOrigin::Here, next), ["-shop/web", "leave p", "watch p"]);
}

#[test]
fn a_final_phase_an_opt_out_and_a_departed_pod_each_end_a_vm() {
    let changes: [fn(&mut Value); 3] = [
        |vmi| vmi["status"]["phase"] = "Failed".into(),
        |vmi| vmi["metadata"]["annotations"] = json!({"imds.kubevirt.io/enabled": "false"}),
        |vmi| vmi["status"]["activePods"] = json!({"p": "elsewhere"}),
    ];
    for change in changes {
        let mut story = Story::begin();
        story.apply(VmiOrigin::Here, vmi(&["p"]));
        story.found("p");
        let mut changed = vmi(&["p"]);
        change(&mut changed);
        assert_eq!(story.apply(VmiOrigin::Here, changed), ["-shop/web", "leave p"]);
    }
}

#[test]
fn a_deleted_vmi_ends_at_once_or_with_its_launcher() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    assert_eq!(story.lose(VmiOrigin::Here), ["leave p"]);
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    story.found("p");
    assert_eq!(story.lose(VmiOrigin::Here), NOTHING);
    assert_eq!(story.pass(LINGER * 100), NOTHING);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn the_source_of_a_migration_serves_until_its_launcher_ends() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    story.found("p");
    let mut migrating = vmi(&["p"]);
    migrating["status"]["activePods"]["z"] = "elsewhere".into();
    assert_eq!(story.apply(VmiOrigin::Here, migrating), NOTHING);
    // The label `nodeName` changed, so the watch by that label sees a deletion.
    assert_eq!(story.lose(VmiOrigin::Here), NOTHING);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
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
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    story.found("p");
    assert_eq!(story.apply(VmiOrigin::Coming, vmi(&["p", "a"])), ["watch a"]);
    assert_eq!(story.pod("a", PodEvent::Found(pod("a", 43))), ["+shop/web@a 102", "ImdsReady web"]);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["a"])), NOTHING, "the one that stays keeps its name");
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["a", "b"])), ["watch b"]);
    assert_eq!(story.pod("b", PodEvent::Found(pod("b", 44))), ["+shop/web 103", "ImdsReady web"]);
}
