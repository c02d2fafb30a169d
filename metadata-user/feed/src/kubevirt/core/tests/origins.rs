//! Which origin names a VMI, and the limits of all VMIs.

use std::collections::BTreeSet;

use serde_json::json;

use super::{NOTHING, Story, named, secretive, vmi};
use crate::kubevirt::Vmi;
use crate::kubevirt::core::{MAX_VMIS, Origin, VMIS_OCTETS};
use crate::pods::PodEvent;

#[test]
fn a_list_removes_missing_vmis_of_its_own_watch_only() {
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
    assert_eq!(story.actions(), ["leave a"]);
    story.core.listed(Origin::Kept, &BTreeSet::new(), story.now);
    assert_eq!(story.actions(), ["leave d"]);
    assert_eq!(story.core.vmis().map(Vmi::key).collect::<Vec<_>>(), ["shop/b", "shop/c"]);
}

#[test]
fn a_kept_vmi_is_served_until_a_watch_names_it() {
    let mut story = Story::begin();
    assert_eq!(story.apply(Origin::Kept, vmi(&["p"])), ["watch p"]);
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    let mut changed = vmi(&["p"]);
    changed["spec"]["hostname"] = "other".into();
    assert_eq!(story.apply(Origin::Here, changed.clone()), ["+shop/web 102"]);
    assert_eq!(story.apply(Origin::Kept, vmi(&["p"])), NOTHING, "what is kept is older");
    story.core.listed(Origin::Kept, &BTreeSet::new(), story.now);
    assert_eq!(story.actions(), NOTHING);
}

#[test]
fn a_vmi_from_the_hook_alone_is_served_until_its_launcher_ends() {
    let mut story = Story::begin();
    assert_eq!(story.apply(Origin::Hook, secretive(&["p"])), ["watch p"]);
    assert_eq!(story.apply(Origin::Hook, secretive(&["p"])), NOTHING, "virt-handler may repeat a call");
    story.found("p");
    assert!(story.core.awaits("shop/web"), "its Secret is late");
    story.put("p", "ci-udata", "userdata", "#one\n");
    story.pod("p", PodEvent::Files { volume: "ci-udata".into() });
    assert!(!story.core.awaits("shop/web"));
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn a_watch_takes_precedence_over_the_hook() {
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
fn an_unserved_vmi_is_not_awaited() {
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
fn an_unreadable_vmi_leaves_the_published_record() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    story.found("p");
    let error = Vmi::read(b"[]").expect_err("no VMI");
    story.core.unreadable("shop/web", &error);
    assert_eq!(story.actions(), ["!shop/web"]);
    story.core.gone(Origin::Here, "shop/other", story.now);
    assert_eq!(story.actions(), ["-shop/other"], "it was never decoded");
    assert_eq!(story.apply(Origin::Here, vmi(&["p"])), NOTHING);
}

#[test]
fn vmis_beyond_the_octet_limit_are_refused_and_known_ones_stay() {
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

#[test]
fn a_vmi_kept_without_its_owner_is_expected_until_the_api_server_names_it() {
    let mut story = Story::begin();
    let mut former = vmi(&["p"]);
    former["metadata"].as_object_mut().expect("an object").remove("ownerReferences");
    assert_eq!(story.apply(Origin::Kept, former.clone()), ["watch p"]);
    assert_eq!(story.found("p"), ["?shop/web 1"], "an earlier release did not keep its owner");
    // In the API, no reference means no owner.
    assert_eq!(story.apply(Origin::Here, former), ["+shop/web 101", "ImdsReady web"]);
}

#[test]
fn a_pod_stays_with_the_vmi_that_named_it_first_whatever_the_others_name() {
    let mut story = Story::begin();
    story.apply(Origin::Here, vmi(&["p"]));
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    let attacker = named("aaa");
    assert_eq!(story.apply(Origin::Here, attacker.clone()), ["!shop/aaa"], "it would be first by its name");
    assert_eq!(story.apply(Origin::Here, attacker.clone()), NOTHING, "said once");
    assert_eq!(story.pod("p", PodEvent::Files { volume: "any".into() }), NOTHING);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"], "the holder's, not the other's");
}
