//! Which origin names a VMI, the limits of all VMIs, and how long what was refused stays refused.

use metadata_content::source::RecordSource;
use serde_json::{Value, json};
use std::collections::BTreeSet;

use super::{NOTHING, Story, VMI_UID, next_vmi, pod, secretive, vmi, vmi_beside, vmi_with};
use crate::kubevirt::Vmi;
use crate::kubevirt::core::{Action, MAX_VMIS, VMIS_BYTES, VmiOrigin};
use crate::pods::{PodEvent, PodUid};
use crate::registry::{RecordId, Registry};
use crate::{FeedEvent, pods};

fn named(name: &str) -> Value {
    named_with(name, "p")
}

fn named_with(name: &str, pod: &str) -> Value {
    let mut vmi = vmi(&[pod]);
    vmi["metadata"]["name"] = name.into();
    vmi
}

#[test]
fn a_list_removes_missing_vmis_of_its_own_watch_only() {
    let mut story = Story::begin();
    for (origin, name) in
        [(VmiOrigin::Here, "a"), (VmiOrigin::Here, "b"), (VmiOrigin::Coming, "c"), (VmiOrigin::Kept, "d")]
    {
        story.apply(origin, named_with(name, name));
    }
    let keys = BTreeSet::from(["shop/b".to_owned()]);
    story.core.listed(VmiOrigin::Here, &keys, story.now);
    assert_eq!(story.actions(), ["leave a"]);
    story.core.listed(VmiOrigin::Kept, &BTreeSet::new(), story.now);
    assert_eq!(story.actions(), ["leave d"]);
    assert_eq!(story.core.vmis().map(Vmi::key).collect::<Vec<_>>(), ["shop/b", "shop/c"]);
}

#[test]
fn a_kept_vmi_is_served_until_a_watch_names_it() {
    let mut story = Story::begin();
    assert_eq!(story.apply(VmiOrigin::Kept, vmi(&["p"])), ["watch p"]);
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    let changed = vmi_with(|vmi| vmi["spec"]["hostname"] = "other".into());
    assert_eq!(story.apply(VmiOrigin::Here, changed.clone()), ["+shop/web 102"]);
    assert_eq!(story.apply(VmiOrigin::Kept, vmi(&["p"])), NOTHING, "what is kept is older");
    story.core.listed(VmiOrigin::Kept, &BTreeSet::new(), story.now);
    assert_eq!(story.actions(), NOTHING);
}

#[test]
fn a_vmi_from_the_hook_alone_is_served_until_its_launcher_ends() {
    let mut story = Story::begin();
    assert_eq!(story.apply(VmiOrigin::Hook, secretive(&["p"])), ["watch p"]);
    assert_eq!(story.apply(VmiOrigin::Hook, secretive(&["p"])), NOTHING, "virt-handler may repeat a call");
    story.found("p");
    assert!(story.core.awaits("shop/web"), "its Secret is late");
    story.put("p", "ci-udata", "userdata", "#one\n");
    story.pod("p", PodEvent::Files { volume: "ci-udata".into() });
    assert!(!story.core.awaits("shop/web"));
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn a_late_stop_of_a_vmi_leaves_the_next_one_of_its_name() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Hook, vmi(&["p"]));
    assert_eq!(story.apply(VmiOrigin::Hook, next_vmi("q")), ["leave p", "watch q"]);
    let stop = |story: &mut Story, vmi: Value| {
        story.core.stopped(&Vmi::from_value(vmi).expect("a VMI"), story.now);
        story.actions()
    };
    assert_eq!(stop(&mut story, vmi(&["p"])), NOTHING, "it is the former one's");
    assert_eq!(story.core.vmis().count(), 1);
    assert_eq!(stop(&mut story, next_vmi("q")), ["leave q"]);
    assert_eq!(story.core.vmis().count(), 0);
}

#[test]
fn a_watch_takes_precedence_over_the_hook() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Hook, vmi(&["p"]));
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), NOTHING);
    story.found("p");
    let old = vmi_with(|vmi| vmi["spec"]["hostname"] = "old".into());
    assert_eq!(story.apply(VmiOrigin::Hook, old), NOTHING);
    story.pod("p", PodEvent::Gone);
    story.lose(VmiOrigin::Here);
    assert_eq!(story.core.vmis().count(), 0);
}

/// A VMI of a namespace without pods, with an annotation of this many bytes.
fn sized(namespace: &str, name: &str, bytes: usize) -> Value {
    let mut vmi = named(name);
    vmi["metadata"]["namespace"] = namespace.into();
    vmi["metadata"]["annotations"] = json!({"imds.kubevirt.io/user-data": "x".repeat(bytes)});
    vmi["status"]["activePods"] = json!({});
    vmi
}

#[test]
fn vmis_and_pods_beyond_the_limits_are_refused() {
    let mut story = Story::begin();
    let mut admitted = 0;
    for n in 0..MAX_VMIS {
        admitted += usize::from(story.apply(VmiOrigin::Here, sized("shop", &format!("v{n}"), 1)) == NOTHING);
    }
    assert_eq!(admitted, MAX_VMIS / 2, "one namespace has at most half");
    assert_eq!(story.apply(VmiOrigin::Here, sized("shop", "more", 1)), ["!shop/more"]);
    assert_eq!(story.apply(VmiOrigin::Here, sized("other", "first", 1)), NOTHING);
    let mut story = Story::begin();
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["a", "b", "c", "d", "e"])).len(), 4);
}

#[test]
fn pods_of_one_namespace_leave_room_for_those_of_another() {
    let mut story = Story::begin();
    let mut pods = 0;
    for n in 0..MAX_VMIS / 2 {
        let uids: Vec<_> = (0..4).map(|pod| format!("p{n}-{pod}")).collect();
        let uids: Vec<_> = uids.iter().map(String::as_str).collect();
        let mut vmi = vmi(&uids);
        vmi["metadata"]["name"] = format!("v{n}").into();
        let actions = story.apply(VmiOrigin::Here, vmi);
        pods += actions.iter().filter(|action| action.starts_with("watch")).count();
    }
    assert_eq!(pods, pods::MAX_PODS / 2);
    // A pod that is not followed for a VMI is free for others.
    let mut beyond = vmi(&["mine"]);
    beyond["metadata"]["name"] = format!("v{}", MAX_VMIS / 2 - 1).into();
    let actions = story.apply(VmiOrigin::Here, beyond);
    assert!(!actions.iter().any(|action| action.starts_with("watch")), "{actions:?}");
    let mut other = vmi(&["mine"]);
    other["metadata"]["namespace"] = "other".into();
    assert_eq!(story.apply(VmiOrigin::Here, other), ["watch mine"]);
    assert_eq!(story.core.shares().pods.top()[0].1, pods::MAX_PODS / 2);
}

#[test]
fn a_namespace_of_large_vmis_leaves_room_for_a_small_one_of_another() {
    let mut story = Story::begin();
    let mut refused = 0;
    for n in 0..22 {
        let actions = story.apply(VmiOrigin::Here, sized("hostile", &format!("v{n}"), 1_500_000));
        refused += usize::from(actions != NOTHING);
    }
    assert!(refused > 0, "it has its share");
    assert_eq!(story.apply(VmiOrigin::Here, sized("modest", "web", 300)), NOTHING);
    let large = Vmi::from_value(sized("hostile", "next", 1_500_000)).expect("a VMI");
    story.core.applied(VmiOrigin::Here, large, story.now);
    let actions = story.all_actions();
    let [Action::Publish(FeedEvent::Rejected { error, .. })] = &actions[..] else { panic!("{actions:?}") };
    let text = error.to_string();
    assert!(text.contains("namespace/hostile holds") && text.contains("Secret"), "{text}");
}

#[test]
fn an_unreadable_vmi_leaves_the_published_record() {
    let mut story = Story::served();
    let error = Vmi::read(b"[]").expect_err("no VMI");
    story.core.unreadable("shop/web", &error);
    assert_eq!(story.actions(), ["!shop/web"]);
    assert_eq!(story.lose_of(VmiOrigin::Here, "shop/other"), ["-shop/other"], "it was never decoded");
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), ["+shop/web 101"], "it is readable again");
}

#[test]
fn vmis_beyond_the_byte_limit_are_refused_and_known_ones_stay() {
    let mut story = Story::begin();
    assert_eq!(story.apply(VmiOrigin::Here, sized("shop", "a", VMIS_BYTES / 4)), NOTHING);
    assert_eq!(story.apply(VmiOrigin::Here, sized("shop", "b", VMIS_BYTES / 4)), ["!shop/b"]);
    assert_eq!(story.apply(VmiOrigin::Here, sized("shop", "a", VMIS_BYTES)), ["!shop/a"]);
    assert_eq!(story.core.vmis.len(), 1);
    assert_eq!(story.apply(VmiOrigin::Here, sized("shop", "a", 10)), ["-shop/a"], "nothing of it is refused");
    story.core.gone(VmiOrigin::Here, "shop/a", story.now);
    assert_eq!((story.core.shares().bytes.used(), story.core.shares().vmis.used()), (0, 0));
}

#[test]
fn a_vmi_kept_without_its_owner_is_expected_until_the_api_server_names_it() {
    let mut story = Story::begin();
    let mut former = vmi(&["p"]);
    former["metadata"].as_object_mut().expect("an object").remove("ownerReferences");
    assert_eq!(story.apply(VmiOrigin::Kept, former.clone()), ["watch p"]);
    assert_eq!(story.found("p"), ["?shop/web 1"], "an earlier release did not keep its owner");
    // In the API, no reference means no owner.
    assert_eq!(story.apply(VmiOrigin::Here, former), ["+shop/web 101", "ImdsReady web"]);
}

#[test]
fn a_pod_stays_with_the_vmi_that_named_it_first_whatever_the_others_name() {
    let mut story = Story::of(vmi(&["p"]));
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    for refused in [&["!shop/aaa"][..], &[]] {
        assert_eq!(story.apply(VmiOrigin::Here, named("aaa")), refused, "it would be first by its name");
    }
    assert_eq!(story.pod("p", PodEvent::Files { volume: "any".into() }), NOTHING);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"], "the holder's, not the other's");
}

/// A VMI of another tenant that names the pod of [`vmi`].
fn claimant() -> Value {
    vmi_with(|vmi| vmi["metadata"] = json!({"name": "x", "namespace": "a", "uid": "other"}))
}

#[test]
fn a_pod_belongs_to_the_vmi_that_its_launcher_runs_whoever_names_it_first() {
    let mut story = Story::begin();
    // After a restart, VMIs may come in any order.
    assert_eq!(story.apply(VmiOrigin::Kept, claimant()), ["watch p"]);
    assert_eq!(story.apply(VmiOrigin::Kept, vmi(&["p"])), ["!shop/web"], "until the launcher is found");
    assert!(story.core.awaits("shop/web") && story.core.awaits("a/x"), "one of them");
    assert_eq!(story.found_running("p", VMI_UID), ["leave p", "!a/x", "watch p", "-shop/web"]);
    assert_eq!(story.found_running("p", VMI_UID), ["+shop/web 101", "ImdsReady web"]);
    assert_eq!(story.apply(VmiOrigin::Here, claimant()), NOTHING);
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), NOTHING);
    assert_eq!(story.lose_of(VmiOrigin::Here, "a/x"), ["-a/x"]);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn a_pod_of_a_vm_that_is_not_served_is_no_other_vms() {
    let mut story = Story::of(vmi_with(|vmi| {
        vmi["metadata"]["annotations"] = json!({"imds.kubevirt.io/enabled": "false"});
    }));
    assert_eq!(story.apply(VmiOrigin::Here, claimant()), ["watch p"]);
    story.core.pod(&"p".parse().expect("a uid"), PodEvent::Found(pod("p", 42)), story.now);
    let actions = story.all_actions();
    let [Action::Leave(_), Action::Publish(FeedEvent::Rejected { key, error })] = &actions[..] else {
        panic!("{actions:?}")
    };
    let text = error.to_string();
    assert!(key == "a/x" && text.contains("pod `p`") && text.contains(VMI_UID), "{key}: {text}");
    assert_eq!(story.apply(VmiOrigin::Here, claimant()), NOTHING, "it is not followed again");
    assert!(story.core.is_settled() && !story.core.awaits("a/x") && story.core.refuses("a/x"));
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), ["watch p"], "it is to be served now");
}

#[test]
fn vmis_that_name_anothers_pod_are_kept_after_the_others() {
    let mut story = Story::of(vmi(&["p"]));
    assert_eq!(story.apply(VmiOrigin::Here, claimant()), ["!a/x"]);
    let kept: Vec<_> = story.core.shared_vmis().iter().map(|vmi| vmi.key()).collect();
    assert_eq!(kept, ["shop/web", "a/x"]);
}

/// Passes what the story has published to a registry. Returns why the VMI is refused there.
fn refused(story: &mut Story, registry: &mut Registry) -> Option<String> {
    for action in story.all_actions() {
        if let Action::Publish(event) = action {
            registry.apply(RecordSource::Kubevirt, event);
        }
    }
    registry.refusal(&RecordId::new(RecordSource::Kubevirt, "shop/web")).map(str::to_owned)
}

#[test]
fn the_same_refusal_of_a_vmi_is_published_once_however_often_it_is_written() {
    let mut story = Story::served();
    let error = Vmi::read(b"[]").expect_err("no VMI");
    for (key, first) in [("shop/web", "!shop/web"), ("shop/new", "!shop/new")] {
        story.core.unreadable(key, &error);
        assert_eq!(story.actions(), [first]);
        for _ in 0..3 {
            story.core.unreadable(key, &error);
        }
        assert_eq!(story.actions(), NOTHING, "{key}");
        let other = Vmi::read(br#"{"spec": {"volumes": "none"}}"#).expect_err("no VMI");
        story.core.unreadable(key, &other);
        assert_eq!(story.actions(), [first], "another reason");
    }
    assert_eq!(story.lose_of(VmiOrigin::Here, "shop/new"), ["-shop/new"]);
    story.core.unreadable("shop/new", &error);
    assert_eq!(story.actions(), ["!shop/new"], "it is there again");
}

/// The newest version of the VMI cannot be decoded.
fn unreadable(story: &mut Story) {
    story.core.unreadable("shop/web", &Vmi::read(b"[]").expect_err("no VMI"));
}

#[test]
fn a_refused_version_stays_refused_when_a_secret_of_the_one_before_changes() {
    type Case = (&'static str, fn(&mut Story));
    let refusals: [Case; 2] = [
        ("unreadable", unreadable),
        ("too large", |story| {
            let mut large = secretive(&["p"]);
            large["metadata"]["annotations"] = json!({"note": "x".repeat(VMIS_BYTES)});
            story.core.applied(VmiOrigin::Here, Vmi::from_value(large).expect("a VMI"), story.now);
        }),
    ];
    let id = RecordId::new(RecordSource::Kubevirt, "shop/web");
    let uid: PodUid = "p".parse().expect("a uid");
    let readable = || Vmi::from_value(secretive(&["p"])).expect("a VMI");
    for (what, refuse) in refusals {
        let (mut story, mut registry) = (Story::begin(), Registry::default());
        story.put("p", "ci-udata", "userdata", "#one\n");
        story.core.applied(VmiOrigin::Here, readable(), story.now);
        story.core.pod(&uid, PodEvent::Found(pod("p", 42)), story.now);
        assert_eq!(refused(&mut story, &mut registry), None, "{what}");
        refuse(&mut story);
        let reason = refused(&mut story, &mut registry);
        assert!(reason.is_some(), "{what}");
        for (text, generation) in [("#two\n", 102), ("#three\n", 103)] {
            story.put("p", "ci-udata", "userdata", text);
            story.core.pod(&uid, PodEvent::Files { volume: "ci-udata".into() }, story.now);
            assert_eq!(refused(&mut story, &mut registry), reason, "{what}");
            assert_eq!(registry.record(&id).expect("a record").generation, generation, "{what}");
        }
        story.core.applied(VmiOrigin::Here, readable(), story.now);
        assert_eq!(refused(&mut story, &mut registry), None, "{what}: it is readable again");
    }
}

#[test]
fn a_refused_version_is_named_beside_what_the_one_before_lacks() {
    let fast = [json!({"name": "fast", "sriov": {}})];
    let in_part = || Vmi::from_value(vmi_beside(&fast, json!({"userData": "#one\n"}))).expect("a VMI");
    let (mut story, mut registry) = (Story::begin(), Registry::default());
    story.core.applied(VmiOrigin::Here, in_part(), story.now);
    story.core.pod(&"p".parse().expect("a uid"), PodEvent::Found(pod("p", 42)), story.now);
    let lacks = refused(&mut story, &mut registry).expect("it is served in part");
    unreadable(&mut story);
    let both = refused(&mut story, &mut registry).expect("it is refused");
    assert!(both.ends_with(&format!("; {lacks}")), "{both}");
    story.core.applied(VmiOrigin::Here, in_part(), story.now);
    assert_eq!(refused(&mut story, &mut registry), Some(lacks), "it is readable again");
}

#[test]
fn a_refusal_ends_with_what_was_refused() {
    let mut story = Story::served();
    let large = vmi_with(|vmi| vmi["metadata"]["annotations"] = json!({"note": "x".repeat(VMIS_BYTES)}));
    assert_eq!(story.apply(VmiOrigin::Here, large), ["!shop/web"]);
    assert_eq!(story.apply(VmiOrigin::Here, vmi(&["p"])), ["+shop/web 101"], "the version before is back");
    let rival = |pod: &str| named_with("rival", pod);
    assert_eq!(story.apply(VmiOrigin::Here, rival("p")), ["!shop/rival"]);
    assert_eq!(story.lose_of(VmiOrigin::Here, "shop/rival"), ["-shop/rival"], "the VMI is deleted");
    assert_eq!(story.apply(VmiOrigin::Here, rival("p")), ["!shop/rival"]);
    assert_eq!(story.apply(VmiOrigin::Here, rival("q")), ["watch q", "-shop/rival"], "it names its own pod");
    assert_eq!(story.lose_of(VmiOrigin::Here, "shop/rival"), ["leave q"]);
}
