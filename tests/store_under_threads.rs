//! Whatever the control side does to the table of slots, each reader at each moment finds what a slot holds, whole,
//! and nobody else's.
//!
//! The control side follows a script drawn from a seed; what a slot holds after each step is known beforehand. A
//! reader notes which steps were done before it looked and which had begun when it had: what it found must be what
//! the slot held after one of these, and never older than what it found before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use metadata_content::dialect;
use metadata_content::record::Record;
use metadata_content::store::{Entry, Interner, RequestLimit, Responses, Store, Vm};
use support::question::Question;
use support::record::Identity;
use support::seed;

const SLOTS: u32 = 3;
const STEPS: usize = 400;
const READERS: u64 = 3;
const RECORDS_PER_SLOT: usize = 4;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    Nothing,
    Expected,
    /// The record of this number, of this slot's VM.
    Record(usize),
}

/// Each slot's records, and what each holds after each step of its own.
struct Script {
    records: Vec<Vec<Arc<Responses>>>,
    steps: Vec<Vec<Holds>>,
}

/// Which record and whose responses are, by every document that tells: the same in all of them, or it is a mix.
fn told(responses: &Responses) -> (u16, usize) {
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
    let key = text("/latest/meta-data/public-keys/0/openssh-key");
    let guest = number(&user_data, "of guest-");
    let record = number(&user_data, "record ");
    assert_eq!((number(&meta_data, "guest-"), number(&key, "guest-")), (guest, guest), "a mix of two VMs");
    assert_eq!(number(&meta_data, "record-"), record, "a mix of two records");
    (u16::try_from(guest).expect("a guest"), record)
}

fn rendered(guest: u16, record: usize, interner: &mut Interner) -> Arc<Responses> {
    let mut identity = Identity::of(guest);
    identity.user_data = format!("#cloud-config\n# record {record} of guest-{guest}\n");
    let mut json: serde_json::Value = serde_json::from_str(&identity.record(1)).expect("JSON");
    json["metadata"] = serde_json::json!({ "is": format!("record-{record}") });
    let parsed = Record::parse("record.json", &json.to_string()).expect("a good record").0;
    let vm = Vm::alone(parsed.vm.uuid.as_str());
    Arc::new(dialect::render(&parsed, interner, vm))
}

impl Script {
    fn draw(random: &mut fastrand::Rng) -> Self {
        let mut interner = Interner::new();
        let records: Vec<Vec<_>> = (0..SLOTS as u16)
            .map(|slot| (0..RECORDS_PER_SLOT).map(|record| rendered(slot, record, &mut interner)).collect())
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

/// What a reader finds in a slot, by the documents themselves.
fn found(store: &Store, slot: u32) -> Holds {
    match store.get(slot) {
        Entry::Unknown => Holds::Nothing,
        Entry::Expected => Holds::Expected,
        Entry::Ready(responses) => {
            let (guest, record) = told(&responses);
            assert_eq!(u32::from(guest), slot, "slot {slot} answers for guest {guest}");
            Holds::Record(record)
        }
    }
}

#[test]
fn alone_the_table_is_what_a_plain_list_would_be() {
    let mut random = fastrand::Rng::with_seed(seed::seed());
    let script = Script::draw(&mut random);
    let store = Store::new(SLOTS);
    let mut at = [0; SLOTS as usize];
    for _ in 0..STEPS {
        let slot = random.u32(..SLOTS);
        at[slot as usize] += 1;
        script.apply(&store, slot, at[slot as usize]);
        for slot in 0..SLOTS {
            assert_eq!(found(&store, slot), script.steps[slot as usize][at[slot as usize]], "slot {slot}");
        }
    }
}

#[test]
fn readers_find_what_a_slot_holds_at_that_moment_whole_and_of_its_own_vm() {
    let mut random = fastrand::Rng::with_seed(seed::seed());
    let script = Script::draw(&mut random);
    let store = Store::new(SLOTS);
    let begun: [AtomicUsize; SLOTS as usize] = Default::default();
    let done: [AtomicUsize; SLOTS as usize] = Default::default();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                let (script, store, begun, done, over) = (&script, &store, &begun, &done, &over);
                let mut random = fastrand::Rng::with_seed(reader);
                scope.spawn(move || {
                    let mut reads = 0_u64;
                    // The oldest step that what was found last can be of.
                    let mut oldest = [0; SLOTS as usize];
                    while !over.load(Ordering::SeqCst) || reads == 0 {
                        let slot = random.usize(..SLOTS as usize);
                        let from = done[slot].load(Ordering::SeqCst).max(oldest[slot]);
                        let found = found(store, slot as u32);
                        let until = begun[slot].load(Ordering::SeqCst);
                        let step = (from..=until).find(|step| script.steps[slot][*step] == found);
                        oldest[slot] = step.unwrap_or_else(|| {
                            panic!("slot {slot} held {found:?}, which is none of its steps {from} to {until}")
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
                script.apply(&store, slot, step);
                done[slot as usize].store(step, Ordering::SeqCst);
            }
            if step % 8 == 0 {
                std::thread::sleep(Duration::from_micros(random.u64(..200)));
            }
        }
        over.store(true, Ordering::SeqCst);
        for reader in readers {
            assert!(reader.join().expect("a reader saw only what was there") > 0);
        }
    });
    for (slot, records) in script.records.iter().enumerate() {
        store.withdraw(slot as u32).expect("the slot is in the table");
        let held = records.iter().map(Arc::strong_count).max();
        assert_eq!(held, Some(1), "the table still holds a record of slot {slot}");
    }
}

#[test]
fn a_slot_is_asked_no_more_than_its_burst_and_its_rate_however_its_records_change() {
    const SECONDS: u64 = 20;
    let mut random = fastrand::Rng::with_seed(seed::seed());
    let script = Script::draw(&mut random);
    for _ in 0..20 {
        let store = Store::new(SLOTS);
        let limit = RequestLimit { per_second: 1 + random.u32(..200), burst: 1 + random.u32(..200) };
        let (mut now, mut admitted) = (Duration::ZERO, 0_u64);
        while now < Duration::from_secs(SECONDS) {
            now += Duration::from_micros(random.u64(..20_000));
            if random.u8(..4) == 0 {
                // Whatever is published is no way round the limit; what is withdrawn is another guest's.
                store
                    .publish(0, Arc::clone(&script.records[0][random.usize(..RECORDS_PER_SLOT)]))
                    .expect("0");
            }
            admitted += u64::from(store.admit(0, limit, now));
        }
        let most = u64::from(limit.burst) + u64::from(limit.per_second) * (SECONDS + 1);
        assert!(admitted <= most, "{admitted} of {most} at {limit:?}");
    }
}
