//! Secrets, NICs and memory: what a record needs beside the VMI.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{NOTHING, Story, pod, secretive, vmi};
use crate::FeedEvent;
use crate::kubevirt::Vmi;
use crate::kubevirt::core::{Action, EventReason, GRACE, VmiOrigin};
use crate::memory_budget::MemoryBudget;
use crate::pods::PodEvent;
use crate::registry::RecordId;
use metadata_content::record::Record;
use metadata_content::source::RecordSource;

#[test]
fn a_late_secret_is_awaited_and_reported_after_the_grace_period() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, secretive(&["p"]));
    assert_eq!(story.found("p"), ["?shop/web 1"]);
    assert_eq!(story.pod("p", PodEvent::Taps(pod("p", 42))), NOTHING);
    assert_eq!(story.pass(GRACE), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.pass(GRACE), NOTHING, "once");
    story.put("p", "ci-udata", "userdata", "#one\n");
    let files = || PodEvent::Files { volume: "ci-udata".into() };
    assert_eq!(story.pod("p", files()), ["+shop/web 101", "+shop/web 101", "ImdsReady web"]);
    story.put("p", "ci-udata", "userdata", "#two\n");
    assert_eq!(story.pod("p", files()), ["+shop/web 102"]);
    // kubelet removes the volumes first: the good record stays.
    story.disk.lock().expect("no panic").clear();
    assert_eq!(story.pod("p", files()), ["!shop/web", "ImdsDegraded web"]);
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn a_vms_volumes_are_watched_before_they_exist() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, secretive(&["p"]));
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
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, secretive(&["p"]));
    story.found("p");
    assert_eq!(story.pod("p", PodEvent::Gone), ["-shop/web", "leave p"]);
}

#[test]
fn a_hot_plugged_nic_is_served_and_an_unplugged_one_is_not() {
    let mut story = Story::begin();
    story.apply(VmiOrigin::Here, vmi(&["p"]));
    story.found("p");
    let mut more = vmi(&["p"]);
    let nic = json!({"name": "red", "bridge": {}, "macAddress": "02:00:00:00:00:02"});
    more["spec"]["domain"]["devices"]["interfaces"].as_array_mut().expect("NICs").push(nic);
    more["spec"]["networks"] =
        json!([{"name": "default", "pod": {}}, {"name": "red", "multus": {"networkName": "r"}}]);
    let nics = |story: &mut Story| {
        story.translate();
        let actions = story.core.actions();
        actions.into_iter().find_map(|action| match action {
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
fn an_unserved_binding_is_reported_at_once_by_name() {
    let mut story = Story::begin();
    let mut sriov = vmi(&["p"]);
    sriov["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "fast", "sriov": {}}]);
    story.apply(VmiOrigin::Here, sriov);
    story.core.pod(&"p".parse().expect("a uid"), PodEvent::Found(pod("p", 42)), story.now);
    story.translate();
    let actions = story.core.actions();
    let [Action::Publish(FeedEvent::Rejected { error, .. }), Action::Report(report)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(error.to_string().contains("`sriov`") && report.message.contains("`fast`"), "{error}");
    assert_eq!(report.reason, EventReason::Degraded);
}

#[test]
fn a_vm_without_memory_is_reported_and_served_once_memory_is_free() {
    const LARGE: usize = 50_000;
    let mut story = Story::begin();
    let room = MemoryBudget::new(330_000);
    let (id, other) =
        (RecordId::new(RecordSource::Kubevirt, "shop/web"), RecordId::new(RecordSource::Api, "other"));
    let taking = Arc::clone(&room);
    let admit =
        move |key: &str, record: &Record| taking.take(&RecordId::new(RecordSource::Kubevirt, key), record);
    story.core = story.core.admitting(Box::new(admit));
    story.put("p", "ci-udata", "userdata", "small");
    story.apply(VmiOrigin::Here, secretive(&["p"]));
    assert_eq!(story.found("p"), ["+shop/web 101", "ImdsReady web"]);
    let small = room.usage().used;
    let Some(record) = story.core.vmis["shop/web"].instances.values().find_map(|i| i.record.clone()) else {
        panic!("there is a record")
    };
    let mut hoarder = (*record).clone();
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
    // The second event clears the complaint.
    assert_eq!(story.actions(), ["+shop/web 102", "+shop/web 102", "ImdsReady web"]);
    room.give_back(&id);
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
