use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Change, Limits, RecordId, RecordSource, RecordStanding, Registry};
use crate::{FeedError, FeedEvent, RejectedVm, VM_TEXT_BYTES};
use metadata_content::record::{Owner, Record};

const A: &str = "7c0f1a52-3b5e-4d1a-9d2c-00000000000a";
const B: &str = "7c0f1a52-3b5e-4d1a-9d2c-00000000000b";

fn record(vm: &str, generation: u64) -> Arc<Record> {
    let text = format!(
        "schema: vmrecord/1\ngeneration: {generation}\nvm: {{uuid: {vm}, name: web, \
         project: {{id: p, number: 1, account: '000000000000'}}}}\nhostname: {{short: web}}\n\
         placement: {{region: r, zone: z}}\n"
    );
    Arc::new(Record::parse("test", &text).expect("a record").0)
}

fn upsert(key: &str, vm: &str, generation: u64) -> FeedEvent {
    FeedEvent::Upsert { key: key.into(), record: record(vm, generation) }
}

fn remove(key: &str) -> FeedEvent {
    FeedEvent::Remove { key: key.into() }
}

fn rejected(key: &str) -> FeedEvent {
    let error = FeedError::Content {
        path: key.into(),
        expected: "a record".into(),
        found: "none".into(),
        remedy: "write one",
    };
    FeedEvent::Rejected { key: key.into(), error }
}

fn id(source: RecordSource, key: &str) -> RecordId {
    RecordId::new(source, key)
}

/// Changes as words: `+api/a 1`, `-api/a`.
fn words(changes: &[Change]) -> Vec<String> {
    let word = |change: &Change| match change {
        Change::Put(id, record) => format!("+{id} {}", record.generation),
        Change::Expect(id, identities) => format!("?{id} {}", identities.len()),
        Change::Drop(id) => format!("-{id}"),
    };
    changes.iter().map(word).collect()
}

#[test]
fn an_expected_record_never_replaces_a_good_one() {
    let mut registry = Registry::default();
    let expect = |key: &str| FeedEvent::Expect { key: key.into(), identities: Vec::new() };
    let steps: [(RecordSource, FeedEvent, &[&str]); 8] = [
        (RecordSource::Kubevirt, expect("ns/a"), &["?kubevirt/ns/a 0"]),
        (RecordSource::Kubevirt, upsert("ns/a", A, 1), &["+kubevirt/ns/a 1"]),
        (RecordSource::Kubevirt, expect("ns/a"), &[]),
        (RecordSource::Kubevirt, expect("ns/b"), &["?kubevirt/ns/b 0"]),
        (RecordSource::Kubevirt, remove("ns/b"), &["-kubevirt/ns/b"]),
        (RecordSource::Api, upsert("b", B, 2), &["+api/b 2"]),
        (RecordSource::Kubevirt, expect("ns/b"), &["?kubevirt/ns/b 0"]),
        // The record in force has the ports.
        (RecordSource::Kubevirt, upsert("ns/b", B, 3), &["-kubevirt/ns/b"]),
    ];
    for (n, (source, event, expected)) in steps.into_iter().enumerate() {
        assert_eq!(words(&registry.apply(source, event)), expected, "step {n}");
    }
    // A source that starts again may expect a record of its former run, and that one stays.
    registry.begin(RecordSource::Kubevirt);
    registry.apply(RecordSource::Kubevirt, expect("ns/a"));
    assert_eq!(words(&registry.apply(RecordSource::Kubevirt, FeedEvent::Synced)), [""; 0]);
    assert!(registry.record(&id(RecordSource::Kubevirt, "ns/a")).is_some(), "it is expected");
    assert!(registry.record(&id(RecordSource::Kubevirt, "ns/b")).is_none(), "nobody has told of it");
}

#[test]
fn the_records_of_a_vms_highest_source_are_in_force() {
    let mut registry = Registry::default();
    let steps: [(RecordSource, FeedEvent, &[&str]); 9] = [
        (RecordSource::Kubevirt, upsert("ns/a", A, 1), &["+kubevirt/ns/a 1"]),
        (RecordSource::Api, upsert("a", A, 2), &["-kubevirt/ns/a", "+api/a 2"]),
        (RecordSource::File, upsert("a.yaml", A, 3), &[]),
        (RecordSource::Kubevirt, upsert("ns/a", A, 4), &[]),
        (RecordSource::Api, upsert("a", A, 5), &["+api/a 5"]),
        (RecordSource::Api, upsert("a", A, 5), &[]),
        (RecordSource::Api, remove("a"), &["-api/a", "+a.yaml 3"]),
        (RecordSource::File, remove("a.yaml"), &["-a.yaml", "+kubevirt/ns/a 4"]),
        (RecordSource::Kubevirt, remove("ns/a"), &["-kubevirt/ns/a"]),
    ];
    for (n, (source, event, expected)) in steps.into_iter().enumerate() {
        assert_eq!(words(&registry.apply(source, event)), expected, "step {n}");
    }
    assert_eq!(registry.ids().count(), 0);
}

#[test]
fn two_records_of_a_vm_by_one_source_are_both_in_force() {
    let mut registry = Registry::default();
    for key in ["ns/a@1", "ns/a@2"] {
        let changes = registry.apply(RecordSource::Kubevirt, upsert(key, A, 1));
        assert_eq!(words(&changes), [format!("+kubevirt/{key} 1")]);
    }
    let changes = registry.apply(RecordSource::Hook, upsert(A, A, 2));
    let expected = ["-kubevirt/ns/a@1", "-kubevirt/ns/a@2", &format!("+hook/{A} 2")];
    assert_eq!(words(&changes), expected);
}

#[test]
fn a_record_that_moves_to_another_vm_unshadows_the_next_source() {
    let mut registry = Registry::default();
    registry.apply(RecordSource::File, upsert("a.yaml", A, 1));
    registry.apply(RecordSource::File, upsert("b.yaml", B, 2));
    registry.apply(RecordSource::Api, upsert("x", A, 3));
    let changes = registry.apply(RecordSource::Api, upsert("x", B, 4));
    assert_eq!(words(&changes), ["-b.yaml", "+api/x 4", "+a.yaml 1"]);
}

#[test]
fn a_record_that_is_refused_leaves_the_last_good_one() {
    let mut registry = Registry::default();
    registry.apply(RecordSource::File, upsert("a.yaml", A, 1));
    let (good, bad) = (id(RecordSource::File, "a.yaml"), id(RecordSource::File, "b.yaml"));
    for key in ["a.yaml", "b.yaml"] {
        assert_eq!(registry.apply(RecordSource::File, rejected(key)), []);
    }
    assert_eq!(registry.standing(&good), Some(RecordStanding::InForce));
    assert!(registry.refusal(&good).is_some_and(|reason| reason.contains("expected a record")));
    assert_eq!(registry.standing(&bad), Some(RecordStanding::Rejected));
    assert_eq!((registry.refusals(), registry.refused().count()), (2, 2));
    assert_eq!(words(&registry.apply(RecordSource::File, upsert("a.yaml", A, 1))), [""; 0], "as it was");
    assert_eq!(words(&registry.apply(RecordSource::File, upsert("b.yaml", B, 1))), ["+b.yaml 1"]);
    assert_eq!((registry.refusals(), registry.refused().count()), (2, 0));
}

#[test]
fn a_shadowed_record_names_the_record_in_force() {
    let mut registry = Registry::default();
    registry.apply(RecordSource::Kubevirt, upsert("ns/a", A, 1));
    registry.apply(RecordSource::File, upsert("a.yaml", A, 1));
    let standing = |key| registry.standing(&key);
    assert_eq!(standing(id(RecordSource::File, "a.yaml")), Some(RecordStanding::InForce));
    let by = id(RecordSource::File, "a.yaml");
    assert_eq!(standing(id(RecordSource::Kubevirt, "ns/a")), Some(RecordStanding::Shadowed { by }));
    assert_eq!(standing(id(RecordSource::Kubevirt, "a.yaml")), None);
}

#[test]
fn a_round_removes_the_records_its_source_did_not_publish() {
    let mut registry = Registry::default();
    for key in ["a.yaml", "b.yaml"] {
        registry.apply(RecordSource::File, upsert(key, if key == "a.yaml" { A } else { B }, 1));
    }
    registry.apply(RecordSource::File, rejected("c.yaml"));
    registry.apply(RecordSource::Api, upsert("x", A, 1));
    assert_eq!(registry.apply(RecordSource::File, FeedEvent::Synced), [], "nothing began again");
    registry.begin(RecordSource::File);
    // An invalid file leaves the last good record.
    registry.apply(RecordSource::File, rejected("b.yaml"));
    registry.apply(RecordSource::File, upsert("d.yaml", A, 1));
    assert_eq!(registry.apply(RecordSource::Api, FeedEvent::Synced), [], "another's word");
    assert_eq!(registry.apply(RecordSource::File, FeedEvent::Synced), [], "a.yaml was not in force");
    let left: Vec<_> = registry.ids().map(RecordId::to_string).collect();
    assert_eq!(left, ["api/x", "b.yaml", "d.yaml"]);
}

#[test]
fn records_beyond_a_sources_limit_are_refused_and_others_unaffected() {
    let mut registry = Registry { limits: Limits { records: 2, refused: 1 }, ..Registry::default() };
    for (key, changes) in [("a", 1), ("b", 1), ("c", 0), ("d", 0)] {
        assert_eq!(registry.apply(RecordSource::Api, upsert(key, A, 1)).len(), changes, "{key}");
    }
    let refused: Vec<_> = registry.refused().map(|(id, _)| id.to_string()).collect();
    assert_eq!((refused, registry.refusals()), (vec!["api/c".to_owned()], 2), "one more is only counted");
    assert_eq!(registry.apply(RecordSource::Api, upsert("a", A, 2)).len(), 1, "what is there may change");
    assert_eq!(registry.apply(RecordSource::Hook, upsert("e", B, 1)).len(), 1);
    registry.apply(RecordSource::Api, remove("a"));
    assert_eq!(registry.apply(RecordSource::Api, upsert("c", B, 3)).len(), 2, "it shadows the hook's");
    assert_eq!(registry.refused().count(), 0);
    assert_eq!((registry.count(RecordSource::Api), registry.count(RecordSource::Hook)), (2, 1));
}

/// In any order of events, the changes leave exactly the records in force that the rule selects.
#[test]
fn changes_add_up_to_the_records_in_force() {
    let mut rng = fastrand::Rng::with_seed(11);
    for _ in 0..200 {
        let mut registry = Registry::default();
        let mut all = BTreeMap::new();
        let mut in_force = BTreeMap::new();
        for generation in 0..40 {
            let source = RecordSource::ALL[rng.usize(..RecordSource::ALL.len())];
            let (key, vm) = (["a", "b", "c"][rng.usize(..3)], [A, B][rng.usize(..2)]);
            let event = if rng.u8(..4) == 0 {
                all.remove(&id(source, key));
                remove(key)
            } else {
                all.insert(id(source, key), (vm, generation));
                upsert(key, vm, generation)
            };
            for change in registry.apply(source, event) {
                match change {
                    Change::Put(id, record) => drop(in_force.insert(id, record.generation)),
                    Change::Drop(id) => assert!(in_force.remove(&id).is_some(), "{id} was not in force"),
                    Change::Expect(id, _) => panic!("{id} is expected without an event"),
                }
            }
            let highest = |vm: &str| all.iter().find(|(_, (of, _))| *of == vm).map(|(id, _)| id.source);
            let expected: BTreeMap<_, _> = all
                .iter()
                .filter(|(id, (vm, _))| highest(vm) == Some(id.source))
                .map(|(id, (_, generation))| (id.clone(), *generation))
                .collect();
            assert_eq!(in_force, expected);
        }
    }
}

#[test]
fn records_of_two_owners_with_one_uuid_are_in_force_apart() {
    let mut registry = Registry::default();
    let owned = |key: &str, owner: Owner| {
        let mut record = (*record(A, 1)).clone();
        record.vm.owner = Some(owner);
        FeedEvent::Upsert { key: key.into(), record: record.into() }
    };
    let of = |namespace| Owner::kubevirt(namespace, "test", "u");
    let front: Owner = serde_json::from_value("kubevirt/b/test/u".into()).expect("an owner");
    let steps: [(RecordSource, FeedEvent, &[&str]); 6] = [
        (RecordSource::Kubevirt, owned("a/test", of("a")), &["+kubevirt/a/test 1"]),
        (RecordSource::Kubevirt, owned("b/test", of("b")), &["+kubevirt/b/test 1"]),
        // A record that names the UUID alone is another VM's.
        (RecordSource::Api, upsert("uuid", A, 2), &["+api/uuid 2"]),
        (RecordSource::Api, owned("front", front), &["-kubevirt/b/test", "+api/front 1"]),
        (RecordSource::Api, remove("front"), &["-api/front", "+kubevirt/b/test 1"]),
        (RecordSource::Kubevirt, remove("a/test"), &["-kubevirt/a/test"]),
    ];
    for (n, (source, event, expected)) in steps.into_iter().enumerate() {
        assert_eq!(words(&registry.apply(source, event)), expected, "step {n}");
    }
}

#[test]
fn refused_records_of_one_namespace_leave_names_for_those_of_another() {
    let mut registry = Registry::default();
    let mut refuse = |key: String| {
        let error = FeedError::Vm { reason: "ä".repeat(10_000) };
        registry.apply(RecordSource::Kubevirt, FeedEvent::Rejected { key, error });
    };
    (0..2 * super::MAX_REFUSED).for_each(|n| refuse(format!("hostile/vm-{n}")));
    refuse("modest/web".into());
    let id = RecordId::new(RecordSource::Kubevirt, "modest/web");
    let reason = registry.refusal(&id).expect("its reason is kept");
    assert!(reason.len() <= super::REASON_BYTES + 3, "{} bytes", reason.len());
    assert_eq!(registry.refused().count(), super::MAX_REFUSED / 2 + 1);
    for n in 0..2 * super::MAX_REFUSED {
        registry.apply(RecordSource::Kubevirt, FeedEvent::Remove { key: format!("hostile/vm-{n}") });
    }
    assert_eq!(registry.refused_share(RecordSource::Kubevirt).map(|share| share.used()), Some(1));
}

#[test]
fn a_record_that_was_never_good_has_the_vm_that_its_source_names() {
    let mut registry = Registry::default();
    let id = RecordId::new(RecordSource::Hook, "a");
    let vm = |name: &str| RejectedVm { name: name.into(), uuid: "7C0F".into(), owner: None };
    let refuse = |registry: &mut Registry, vm: Option<RejectedVm>| {
        let error = FeedError::Vm { reason: "no".into() }.of(vm);
        registry.apply(RecordSource::Hook, FeedEvent::Rejected { key: "a".into(), error });
    };
    refuse(&mut registry, Some(vm("web")));
    assert_eq!((registry.rejected_vm(&id), registry.refusal(&id)), (Some(&vm("web")), Some("no")));
    let found = registry.rejected_vm(&id).expect("a VM");
    for (name, is_its) in [("web", true), ("7c0f", true), ("", false), ("we", false)] {
        assert_eq!(found.is_called(name), is_its, "{name}");
    }
    refuse(&mut registry, Some(vm("db")));
    assert_eq!(registry.rejected_vm(&id), Some(&vm("db")), "it was renamed");
    refuse(&mut registry, None);
    assert_eq!(registry.rejected_vm(&id), None, "its source does not tell");
    refuse(&mut registry, Some(vm("web")));
    registry.apply(RecordSource::Hook, upsert("a", A, 1));
    assert_eq!(registry.rejected_vm(&id), None, "a good version says itself whose it is");
    refuse(&mut registry, Some(vm("db")));
    assert_eq!(registry.rejected_vm(&id), None, "the good version stays");
    for (text, expected) in [
        (serde_json::json!({"vm": {"name": "web", "uuid": "7C0F"}, "schema": 9}), Some(vm("web"))),
        (serde_json::json!({"vm": {"name": "w".repeat(VM_TEXT_BYTES + 1)}}), None),
        (serde_json::json!({"vm": {"uuid": "7C0F"}}), None),
        (serde_json::json!(["vm"]), None),
    ] {
        assert_eq!(RejectedVm::described(&text), expected, "{text}");
    }
}
