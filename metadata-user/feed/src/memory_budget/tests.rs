use super::{DEFAULT_BYTES, LEAST_BYTES, MemoryBudget, RESERVED_BYTES, WORKER_BYTES, Weight, within};
use crate::registry::RecordId;
use metadata_content::record::Record;
use metadata_content::source::RecordSource;

/// A record whose user-data repeats `letter` this many times.
fn record(letter: &str, bytes: usize) -> Record {
    let text = "schema: vmrecord/1\ngeneration: 1\nvm: {uuid: 7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d, name: a, \
                project: {id: p, number: 1, account: '000000000000'}}\nhostname: {short: a}\n\
                placement: {region: r, zone: z}\nserve: {limits: {user_data: 1048576}}\n";
    let mut record = Record::parse("a", text).expect("a good record").0;
    record.user_data = Some(bytes::Bytes::from(letter.repeat(bytes)).into());
    record
}

fn id(key: &str) -> RecordId {
    RecordId::new(RecordSource::File, key)
}

const LARGE: usize = 100_000;

#[test]
fn a_record_beyond_the_limit_is_refused_with_its_size_and_the_setting() {
    let large = record("a", LARGE);
    let room = MemoryBudget::new(Weight::of(&large).alone() + 1_000);
    room.take(&id("a"), &large).expect("there is room for one");
    let refused = room.take(&id("b"), &record("b", LARGE)).expect_err("there is room for one");
    assert_eq!(room.usage().refusals, 1);
    let text = refused.to_string();
    for said in ["record_memory", "KiB of memory", "are taken"] {
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn a_record_that_grew_too_much_keeps_its_former_charge() {
    let small = record("a", 1_000);
    let room = MemoryBudget::new(Weight::of(&small).alone() + 1_000);
    room.take(&id("a"), &small).expect("room");
    let before = room.usage().used;
    room.take(&id("a"), &record("a", LARGE)).expect_err("no room");
    assert_eq!(room.usage().used, before);
    room.take(&id("a"), &small).expect("the former version is there");
}

#[test]
fn bytes_that_records_share_are_charged_once() {
    let (first, other) = (record("a", LARGE), record("b", LARGE));
    let room = MemoryBudget::new(usize::MAX);
    for key in ["a", "b", "c"] {
        room.take(&id(key), &first).expect("room");
    }
    let weight = Weight::of(&first);
    assert_eq!(room.usage().used, weight.alone() + 2 * weight.own());
    room.take(&id("c"), &other).expect("room");
    assert_eq!(room.usage().used, 2 * weight.alone() + weight.own());
    for key in ["a", "b", "c"] {
        room.give_back(&id(key));
    }
    assert_eq!(room.usage().used, 0);
}

#[test]
fn freed_memory_is_announced_once_it_suffices() {
    let large = record("a", LARGE);
    let room = MemoryBudget::new(Weight::of(&large).alone() + 1_000);
    let freed = room.freed();
    room.take(&id("small"), &record("s", 10)).expect("room");
    room.take(&id("large"), &large).expect_err("no room beside the small one");
    room.take(&id("other"), &record("o", LARGE - 1_000)).expect_err("nor for this");
    assert!(!freed.has_changed().expect("the room is there"));
    room.give_back(&id("small"));
    assert!(freed.has_changed().expect("the room is there"));
    room.take(&id("large"), &large).expect("there is room now");
    // Each release is announced, so that a refused record gets another chance.
    let freed = room.freed();
    room.give_back(&id("large"));
    assert!(freed.has_changed().expect("the room is there"));
}

#[test]
fn charges_of_queued_records_stay_until_their_feed_ends() {
    let room = MemoryBudget::new(usize::MAX);
    let (there, comes) = (record("a", 10), record("b", 10));
    room.take(&id("there"), &there).expect("room");
    room.arrive(&id("there"), &there).expect("room");
    room.take(&id("comes"), &comes).expect("room");
    let both = room.usage().used;
    room.keep_only(RecordSource::File, |_| false);
    assert!(room.usage().used > 0 && room.usage().used < both, "what is on its way stays");
    room.forget_pending(RecordSource::File);
    assert_eq!(room.usage().used, 0);
}

/// A record of a VM in a namespace.
fn of(namespace: &str, name: usize) -> RecordId {
    RecordId::new(RecordSource::Kubevirt, &format!("{namespace}/vm-{name}"))
}

#[test]
fn a_namespace_that_fills_the_memory_leaves_room_for_another() {
    let room = MemoryBudget::new(64 << 20);
    let mut taken = 0;
    for n in 0..200 {
        taken += usize::from(room.take(&of("hostile", n), &record(&n.to_string(), LARGE * 3)).is_ok());
    }
    assert!(taken > 10 && room.usage().used <= 32 << 20, "{taken} records, {:?}", room.usage());
    let refused = room.take(&of("hostile", 999), &record("z", LARGE * 10)).expect_err("it has its share");
    let text = refused.to_string();
    assert!(text.contains("by namespace/hostile") && text.contains("its share"), "{text}");
    // Small and large records of another namespace are admitted.
    room.take(&of("modest", 0), &record("m", 1_000)).expect("a small one");
    room.take(&of("modest", 1), &record("n", LARGE * 3)).expect("a large one");
    let shares = room.shares();
    assert_eq!((shares[0].limit, shares[0].top.len()), ("record_memory", 2));
    assert_eq!(shares[0].top[0].0, of("hostile", 0).tenant());
    assert!(room.free_for(&of("modest", 0).tenant()) > room.free_for(&of("hostile", 0).tenant()));
}

#[test]
fn tenants_pay_equal_parts_of_what_they_share_and_nothing_is_left_of_it() {
    let room = MemoryBudget::new(64 << 20);
    let shared = record("s", LARGE);
    let weight = Weight::of(&shared);
    room.take(&of("a", 0), &shared).expect("room");
    room.take(&of("b", 0), &shared).expect("room");
    room.take(&of("b", 1), &shared).expect("room");
    let content = weight.alone() - weight.own();
    assert!(room.usage().used.abs_diff(content + 3 * weight.own()) <= 2, "{:?}", room.usage());
    let held = room.shares()[0].top.clone();
    assert_eq!(held[0], (of("b", 0).tenant(), content.div_ceil(2) + 2 * weight.own()));
    assert_eq!(held[1], (of("a", 0).tenant(), content.div_ceil(2) + weight.own()));
    for id in [of("b", 0), of("a", 0), of("b", 1)] {
        room.give_back(&id);
    }
    assert_eq!((room.usage().used, room.shares()[0].top.len()), (0, 0));
}

#[test]
fn a_lower_limit_removes_no_record() {
    let large = record("a", LARGE);
    let room = MemoryBudget::new(usize::MAX);
    room.take(&id("a"), &large).expect("room");
    room.set_limit(1);
    room.take(&id("a"), &record("a", LARGE / 2)).expect("it shrinks");
    room.take(&id("b"), &record("b", 1)).expect_err("no room");
}

#[test]
fn the_memory_for_records_follows_the_control_groups_limit() {
    let rest = |limit: usize, workers: usize| {
        let rest = limit - RESERVED_BYTES - WORKER_BYTES * workers;
        rest - rest / 8
    };
    for (limit, workers, expected) in [
        (None, 1, DEFAULT_BYTES),
        (Some(512 << 20), 1, rest(512 << 20, 1)),
        (Some(4_usize << 30), 4, rest(4 << 30, 4)),
        (Some(64 << 20), 1, LEAST_BYTES),
        (Some(0), 32, LEAST_BYTES),
    ] {
        assert_eq!(
            within(limit.map(|limit| limit as u64), workers),
            expected,
            "{limit:?}, {workers} workers"
        );
    }
}

#[test]
fn a_network_text_is_charged_with_what_its_document_holds() {
    const MAPPINGS: usize = 1_000;
    let with = |raw: String| {
        let mut value = serde_json::to_value(record("a", 1)).expect("JSON");
        value["network"]["mode"] = "raw".into();
        value["network"]["raw"] = raw.into();
        Weight::of(&Record::parse("a.json", &value.to_string()).expect("a record").0).alone()
    };
    let text = |member: &str| format!("{{version: 2, a: [{}]}}", vec![member; MAPPINGS].join(","));
    let (mappings, words) = (with(text("{a: 0}")), with(text("xxxxxx")));
    // A mapping of one member takes a node of a tree, whatever is in it.
    assert!(mappings > words + MAPPINGS * 500, "{mappings} and {words}");
}
