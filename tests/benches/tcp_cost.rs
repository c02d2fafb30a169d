//! CPU time per received frame in the stack alone: `cargo bench -p xdp-imds-tests --bench tcp_cost [-- GUESTS …]`.
//!
//! All guests perform each step at the same time and in random order: SYN, ACK, GET of a document of theirs, FIN, ACK.
//! As in a boot storm, nothing of a guest is in the CPU caches when its frame arrives. Replies are discarded. The
//! output has median and range, for guests that complete their checksums and for guests that leave them to the device,
//! with frames one by one and in groups that are read ahead (`Stack::read_ahead`), and with the dialect rendered in
//! advance and when the guests first ask. The three alternate within a run.

use std::sync::Arc;
use std::time::Duration;

use metadata_content::dialect;
use metadata_content::on_demand::OnDemand;
use metadata_content::record::{Dialects, Record};
use metadata_content::sink::Outbox;
use metadata_content::store::{Interner, Store, VmState};
use metadata_content::token::Keyring;
use metadata_datapath::GROUP;
use metadata_datapath::stack::{Stack, StackConfig, Transmit};
use metadata_feed::state::mailboxes::Mailboxes;
use metadata_user::service::MetadataService;
use smoltcp::wire::TcpControl;
use support::raw::Segment;
use support::wire::at;
use support::{checksum, question};

const ROUNDS: u32 = 40;
const GET: &[u8] = b"GET /v1/meta-data HTTP/1.1\r\nHost: 169.254.169.254\r\nUser-Agent: Cloud-Init/25.1\r\n\
    Accept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n";
/// Where a frame's TCP header starts: behind 14 bytes of Ethernet and 20 of IPv4.
const TCP: usize = 34;

/// Discards frames, and records the service's next sequence number.
#[derive(Default)]
struct Tally {
    next: u32,
}

impl Transmit for Tally {
    fn send(&mut self, frame: &[u8]) {
        let seq = u32::from_be_bytes([frame[38], frame[39], frame[40], frame[41]]);
        let payload = frame.len() - TCP - usize::from(frame[46] >> 4) * 4;
        let flags = u32::from(frame[47] & 1) + u32::from(frame[47] >> 1 & 1);
        self.next = seq.wrapping_add(payload as u32).wrapping_add(flags);
    }
}

/// CPU time of this thread. Other work on the machine affects it only through the caches.
fn on_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("a time after the thread's start")
}

/// Number of measurements of each kind; the result is their median.
const REPEATS: usize = 5;

/// How a guest fills the checksums of its segments.
#[derive(Clone, Copy, Debug)]
enum Sums {
    Complete,
    Partial,
}

/// A frame with variable port, acknowledgement number and checksum.
struct Frame {
    bytes: Vec<u8>,
    /// The sum of the constant bytes, and the value of a partial checksum.
    rest: u32,
    partial: [u8; 2],
}

impl Frame {
    fn of(segment: &Segment) -> Self {
        let mut bytes = segment.frame(0);
        checksum::partial(&mut bytes);
        let partial = [bytes[TCP + 16], bytes[TCP + 17]];
        bytes[TCP..TCP + 2].fill(0);
        bytes[TCP + 8..TCP + 12].fill(0);
        let words = bytes[TCP..].chunks(2);
        let rest = words.map(|w| u32::from(w[0]) << 8 | u32::from(w.get(1).copied().unwrap_or(0))).sum();
        Self { bytes, rest, partial }
    }

    fn take_port(&mut self, port: u16) {
        self.bytes[TCP..TCP + 2].copy_from_slice(&port.to_be_bytes());
    }

    fn acknowledges(&mut self, ack: u32, sums: Sums) {
        self.bytes[TCP + 8..TCP + 12].copy_from_slice(&ack.to_be_bytes());
        let port = u32::from(self.bytes[TCP]) << 8 | u32::from(self.bytes[TCP + 1]);
        let sum = self.rest + port + (ack >> 16) + (ack & 0xffff);
        let sum = (sum & 0xffff) + (sum >> 16);
        let complete = !((sum & 0xffff) + (sum >> 16)) as u16;
        let field = match sums {
            Sums::Complete => complete.to_be_bytes(),
            Sums::Partial => self.partial,
        };
        self.bytes[TCP + 16..TCP + 18].copy_from_slice(&field);
    }
}

fn main() {
    let mut numbers: Vec<u32> = std::env::args().filter_map(|word| word.parse().ok()).collect();
    if numbers.is_empty() {
        numbers = vec![100, 1_000, 2_000, 4_000];
    }
    for guests in numbers {
        let [in_advance, when_asked] = contents(guests);
        for sums in [Sums::Complete, Sums::Partial] {
            let mut costs = [Vec::new(), Vec::new(), Vec::new()];
            for _ in 0..REPEATS {
                let [single, group, asked] = &mut costs;
                single.push(measure(&in_advance, guests, sums, 1));
                group.push(measure(&in_advance, guests, sums, GROUP));
                asked.push(measure(&when_asked, guests, sums, GROUP));
            }
            for (costs, name) in costs.iter().zip(["one by one", "in groups", "on demand, in groups"]) {
                let [syn, ack, get, fin, last, request] = std::array::from_fn(|at| column(costs, at));
                println!(
                    "{guests:5} guests, {sums:?} checksums, {name:20}: SYN {syn}, ACK {ack}, GET {get}, FIN {fin}, \
                     ACK {last}; {request} ns per request"
                );
            }
        }
    }
}

/// The median of a column, with its range.
fn column(costs: &[[f64; 6]], at: usize) -> String {
    let mut column: Vec<f64> = costs.iter().map(|cost| cost[at]).collect();
    column.sort_by(f64::total_cmp);
    format!("{:.0} ({:.0}-{:.0})", column[REPEATS / 2], column[0], column[REPEATS - 1])
}

/// A typical record for each guest: rendered in all dialects in advance, and rendered when guests ask.
fn contents(guests: u32) -> [Arc<OnDemand>; 2] {
    let [in_advance, when_asked] = std::array::from_fn(|_| OnDemand::new(Store::new(guests)));
    let (keyring, mut interner) = (Arc::new(Keyring::ephemeral()), Interner::new());
    let mailboxes = Mailboxes::in_memory(Outbox::detached());
    for slot in 0..guests {
        let mut record = question::typical_record(slot, None);
        record["serve"]["limits"] = serde_json::json!({ "rps": 1_000_000, "burst": 1_000_000 });
        let record = Arc::new(Record::parse("vm.json", &record.to_string()).expect("a good record").0);
        let vm = VmState::of(
            &record,
            Arc::clone(&keyring),
            mailboxes.for_record(metadata_content::source::RecordSource::File, "vm.json", &record),
        );
        let all = Arc::new(dialect::render(&record, &mut interner, vm.clone()));
        in_advance.store().publish(slot, all).expect("a slot of the table");
        let none = dialect::render_asked(&record, &mut interner, vm, Dialects::NONE);
        when_asked.store().publish(slot, Arc::new(none)).expect("a slot of the table");
    }
    [in_advance, when_asked].map(Arc::new)
}

/// Nanoseconds per segment of each kind, and per request, for frames in groups of `size`.
fn measure(content: &Arc<OnDemand>, guests: u32, sums: Sums, size: usize) -> [f64; 6] {
    let mut stack = Stack::new(StackConfig::default(), MetadataService::new(Arc::clone(content)));
    let get_end = 1001 + GET.len() as u32;
    let mut steps = [
        Segment::syn(0, 1000),
        Segment::ack(0, 1001, 0),
        Segment::ack(0, 1001, 0).with(GET),
        Segment::ack(0, get_end, 0).control(TcpControl::Fin),
        Segment::ack(0, get_end + 1, 0),
    ]
    .map(|segment| Frame::of(&segment));
    let mut next_numbers = vec![0_u32; guests as usize];
    let mut tally = Tally::default();
    let rounds = (ROUNDS * 1000 / guests).min(50_000);
    let mut spent = [Duration::ZERO; 5];
    let mut order: Vec<u32> = (0..guests).collect();
    let mut random = fastrand::Rng::with_seed(1);
    let mut buffers = vec![Vec::new(); GROUP];
    for round in 0..rounds {
        let now = at(Duration::from_millis(u64::from(round)));
        random.shuffle(&mut order);
        for (step, frame) in steps.iter_mut().enumerate() {
            frame.take_port(1 + (round % 60_000) as u16);
            let start = on_cpu();
            for guests in order.chunks(size) {
                for (guest, buffer) in guests.iter().zip(&mut buffers) {
                    frame.acknowledges(next_numbers[*guest as usize], sums);
                    buffer.clone_from(&frame.bytes);
                }
                let mut group: [(u32, &[u8]); GROUP] = [(0, &[]); GROUP];
                for ((guest, buffer), place) in guests.iter().zip(&buffers).zip(&mut group) {
                    *place = (*guest, buffer);
                }
                let group = &group[..guests.len()];
                stack.read_ahead(group);
                for (guest, bytes) in group {
                    tally.next = next_numbers[*guest as usize];
                    stack.receive(now, *guest, bytes, &mut tally);
                    next_numbers[*guest as usize] = tally.next;
                }
            }
            spent[step] += on_cpu().saturating_sub(start);
        }
        stack.step(now, &mut tally);
    }
    let requests = f64::from(rounds) * f64::from(guests);
    let [syn, ack, get, fin, last] = spent.map(|spent| spent.as_nanos() as f64 / requests);
    let stats = stack.stats();
    assert_eq!(
        (stats.accepted as f64, stats.connections),
        (requests, 0),
        "every connection is served and closed"
    );
    assert_eq!(stats.dropped_checksum, 0, "every checksum is correct");
    [syn, ack, get, fin, last, syn + ack + get + fin + last]
}
