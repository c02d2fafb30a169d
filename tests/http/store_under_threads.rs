//! While the control side changes the table of slots, each reader finds the complete, current responses of a slot's VM.
//!
//! The control side follows a script from a seed, which determines the contents of a slot after each step. A reader
//! notes the last step done before its read and the last step begun after it. It must find the contents after one of
//! the steps in this range, and never older contents than it found before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use metadata_content::dialect;
use metadata_content::on_demand::OnDemand;
use metadata_content::record::{Dialects, Record};
use metadata_content::store::{Host, Interner, RequestLimit, Responses, SlotState, Store, VmState};
use support::question::Question;
use support::record::Identity;
use support::seed;

const SLOTS: u32 = 3;
const STEPS: usize = 400;
const READERS: u64 = 3;
const RECORDS_PER_SLOT: usize = 4;

/// The contents of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    Nothing,
    Expected,
    /// The record of this number of the slot's VM.
    Record(usize),
}

/// The records of each slot, and its contents after each of its steps.
struct Script {
    records: Vec<Vec<Arc<Responses>>>,
    steps: Vec<Vec<Holds>>,
}

/// When the dialects of records are rendered.
#[derive(Clone, Copy, Debug)]
enum Rendered {
    InAdvance,
    OnDemand,
}

/// The guest and the number of the record in all documents of `responses`, which must agree.
fn guest_and_record(responses: &Responses) -> (u16, usize) {
    let text = |path| {
        let answer = Question::get(path).ask(responses);
        String::from_utf8(answer.body().to_bytes().to_vec()).expect("text")
    };
    let number = |text: &str, after: &str| -> usize {
        let (_, rest) = text.split_once(after).unwrap_or_else(|| panic!("no `{after}` in {text}"));
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().expect("a number")
    };
    let user_data = text("/v1/user-data");
    let meta_data = text("/v1/meta-data");
    let key_path = "/latest/meta-data/public-keys/0/openssh-key";
    let is_missing = !dialect::missing(responses, Host::Metadata, key_path).is_empty();
    let key = if is_missing { meta_data.clone() } else { text(key_path) };
    let guest = number(&user_data, "of guest-");
    let record = number(&user_data, "record ");
    assert_eq!(
        (number(&meta_data, "guest-"), number(&key, "guest-")),
        (guest, guest),
        "the documents belong to two VMs"
    );
    assert_eq!(number(&meta_data, "record-"), record, "the documents belong to two records");
    (u16::try_from(guest).expect("a guest"), record)
}

fn render(guest: u16, record: usize, rendered: Rendered, interner: &mut Interner) -> Arc<Responses> {
    let mut identity = Identity::of(guest);
    identity.user_data = format!("#cloud-config\n# record {record} of guest-{guest}\n");
    let mut json: serde_json::Value = serde_json::from_str(&identity.record(1)).expect("JSON");
    json["metadata"] = serde_json::json!({ "is": format!("record-{record}") });
    let parsed = Arc::new(Record::parse("record.json", &json.to_string()).expect("a good record").0);
    let vm = VmState::alone(parsed.vm.uuid.as_str());
    Arc::new(match rendered {
        Rendered::InAdvance => dialect::render(&parsed, interner, vm),
        Rendered::OnDemand => dialect::render_asked(&parsed, interner, vm, Dialects::NONE),
    })
}

impl Script {
    fn draw(random: &mut fastrand::Rng, when: Rendered) -> Self {
        let mut interner = Interner::new();
        let records: Vec<Vec<_>> = (0..SLOTS as u16)
            .map(|slot| {
                (0..RECORDS_PER_SLOT).map(|record| render(slot, record, when, &mut interner)).collect()
            })
            .collect();
        let steps = (0..SLOTS).map(|_| {
            let step = |_| match random.usize(..RECORDS_PER_SLOT + 2) {
                0 => Holds::Nothing,
                1 => Holds::Expected,
                record => Holds::Record(record - 2),
            };
            std::iter::once(Holds::Nothing).chain((0..STEPS).map(step)).collect()
        });
        let steps = steps.collect();
        Self { records, steps }
    }

    fn apply(&self, store: &Store, slot: u32, step: usize) {
        let done = match self.steps[slot as usize][step] {
            Holds::Nothing => store.withdraw(slot),
            Holds::Expected => store.expect(slot),
            Holds::Record(record) => store.publish(slot, Arc::clone(&self.records[slot as usize][record])),
        };
        done.expect("the slot is in the table");
    }
}

/// The contents of a slot according to its documents.
fn contents(content: &OnDemand, slot: u32) -> Holds {
    match content.get(slot, Host::Metadata, "/v1/user-data") {
        SlotState::Unknown => Holds::Nothing,
        SlotState::Expected => Holds::Expected,
        SlotState::Ready(responses) => {
            let (guest, record) = guest_and_record(&responses);
            assert_eq!(u32::from(guest), slot, "slot {slot} answers for guest {guest}");
            Holds::Record(record)
        }
    }
}

#[test]
fn without_threads_the_table_behaves_like_a_plain_list() {
    let mut random = fastrand::Rng::with_seed(seed());
    let script = Script::draw(&mut random, Rendered::OnDemand);
    let content = OnDemand::new(Store::new(SLOTS));
    let mut at = [0; SLOTS as usize];
    for _ in 0..STEPS {
        let slot = random.u32(..SLOTS);
        at[slot as usize] += 1;
        script.apply(content.store(), slot, at[slot as usize]);
        for slot in 0..SLOTS {
            assert_eq!(
                contents(&content, slot),
                script.steps[slot as usize][at[slot as usize]],
                "slot {slot}"
            );
        }
    }
}

#[test]
fn readers_find_the_current_and_complete_responses_of_a_slots_vm() {
    for when in [Rendered::InAdvance, Rendered::OnDemand] {
        readers_agree_with_the_script(when);
    }
}

fn readers_agree_with_the_script(when: Rendered) {
    let mut random = fastrand::Rng::with_seed(seed());
    let script = Script::draw(&mut random, when);
    let content = OnDemand::new(Store::new(SLOTS));
    let begun: [AtomicUsize; SLOTS as usize] = Default::default();
    let done: [AtomicUsize; SLOTS as usize] = Default::default();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                let (script, content, begun, done, over) = (&script, &content, &begun, &done, &over);
                let mut random = fastrand::Rng::with_seed(reader);
                scope.spawn(move || {
                    let mut reads = 0_u64;
                    // The first step that matches the last contents found.
                    let mut oldest = [0; SLOTS as usize];
                    while !over.load(Ordering::SeqCst) || reads == 0 {
                        let slot = random.usize(..SLOTS as usize);
                        let from = done[slot].load(Ordering::SeqCst).max(oldest[slot]);
                        let found = contents(content, slot as u32);
                        let until = begun[slot].load(Ordering::SeqCst);
                        let step = (from..=until).find(|step| script.steps[slot][*step] == found);
                        oldest[slot] = step.unwrap_or_else(|| {
                            panic!("slot {slot} held {found:?}, which matches none of its steps {from} to {until}")
                        });
                        reads += 1;
                    }
                    reads
                })
            })
            .collect();
        for step in 1..=STEPS {
            for slot in 0..SLOTS {
                begun[slot as usize].store(step, Ordering::SeqCst);
                script.apply(content.store(), slot, step);
                done[slot as usize].store(step, Ordering::SeqCst);
            }
            if step % 8 == 0 {
                std::thread::sleep(Duration::from_micros(random.u64(..200)));
            }
        }
        over.store(true, Ordering::SeqCst);
        for reader in readers {
            assert!(reader.join().expect("the reader found only valid contents") > 0);
        }
    });
    for (slot, records) in script.records.iter().enumerate() {
        content.store().withdraw(slot as u32).expect("the slot is in the table");
        let held = records.iter().map(Arc::strong_count).max();
        assert_eq!(held, Some(1), "the table still holds a record of slot {slot}");
    }
}

#[test]
fn changes_of_its_record_do_not_reset_the_request_limit_of_a_slot() {
    const SECONDS: u64 = 20;
    let mut random = fastrand::Rng::with_seed(seed());
    let script = Script::draw(&mut random, Rendered::InAdvance);
    for _ in 0..20 {
        let store = Store::new(SLOTS);
        let limit = RequestLimit { per_second: 1 + random.u32(..200), burst: 1 + random.u32(..200) };
        let (mut now, mut admitted) = (Duration::ZERO, 0_u64);
        while now < Duration::from_secs(SECONDS) {
            now += Duration::from_micros(random.u64(..20_000));
            if random.u8(..4) == 0 {
                // Publishing a record must not reset the limit. Withdrawing a record resets it, for the next guest.
                store
                    .publish(0, Arc::clone(&script.records[0][random.usize(..RECORDS_PER_SLOT)]))
                    .expect("0");
            }
            admitted += u64::from(store.admit(0, limit, now));
        }
        let most = u64::from(limit.burst) + u64::from(limit.per_second) * (SECONDS + 1);
        assert!(admitted <= most, "{admitted} requests admitted at {limit:?}; the most is {most}");
    }
}
