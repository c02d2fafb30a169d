//! The memory per VM and the rate at which records are rendered:
//! `cargo bench -p xdp-imds-tests --bench render_cost`.
//!
//! The VMs are [`support::question`]. The first VM also allocates what all VMs share; each further one adds only its own
//! memory. The bench fails above [`MOST_PER_VM`], or if `record_memory` counts less than is allocated.
//!
//! `-- --json` prints each line of the table as JSON. `-- 64 256` sets the numbers of VMs in the measurements by size
//! of user-data.

use std::alloc::System;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_content::dialect;
use metadata_content::on_demand::OnDemand;
use metadata_content::record::{Dialect, Dialects, Record};
use metadata_content::sink::Outbox;
use metadata_content::store::{Endpoint, Host, Interner, Responses, SlotState, Store, VmState};
use metadata_content::token::Keyring;
use metadata_feed::memory_budget::Weight;
use metadata_feed::state::mailboxes::Mailboxes;
use serde_json::json;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::question;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Most bytes that one VM may take for itself with all dialects rendered: responses, mailbox, and its part of the
/// tables that hold them. Its record is not included.
const MOST_PER_VM: usize = 32 << 10;
/// Number of VMs in the measurements by dialect.
const FEW: u32 = 1_000;

/// Names and paths for the measurements of dialects rendered on demand. The VMs ask for the paths in turn, each for
/// one.
const ASKED: [(&str, &[&str]); 6] = [
    ("asked for nothing", &["/of/no/dialect"]),
    ("asked for NoCloud", &["/v1/meta-data"]),
    ("asked for EC2", &["/latest/meta-data"]),
    ("asked for OpenStack", &["/openstack"]),
    ("asked for Azure", &["/metadata/instance"]),
    ("three clouds", &["/v1/meta-data", "/latest/meta-data", "/openstack"]),
];
/// Numbers of VMs in the measurements by size of user-data.
const BY_USER_DATA: [u32; 2] = [64, 256];
/// Sizes of user-data, in bytes.
const USER_DATA: [usize; 4] = [2 << 10, 16 << 10, 64 << 10, 1 << 20];

/// The dialects and user-data of the VMs.
#[derive(Clone, Copy, Debug, Default)]
struct Load<'a> {
    dialects: Option<&'a [Dialect]>,
    /// Size of each VM's own user-data in bytes; without it, the 300 bytes of the typical VM.
    user_data: Option<usize>,
    /// True if the user-data is not text.
    binary: bool,
    /// Paths that the VMs ask for in turn, each for one. If empty, all dialects are rendered in advance.
    asked: &'a [&'static str],
}

impl Load<'_> {
    fn record(&self, number: u32) -> String {
        let mut record = question::typical_record(number, self.dialects);
        let Some(bytes) = self.user_data else { return record.to_string() };
        let mut rng = fastrand::Rng::with_seed(number.into());
        let text: Vec<u8> = match self.binary {
            // The magic number of gzip (RFC 1952 §2.3.1).
            true => {
                [0x1f, 0x8b].into_iter().chain(std::iter::repeat_with(|| rng.u8(..))).take(bytes).collect()
            }
            false => {
                let line = format!("# a line of \"VM\" {number}, {}\n", rng.u64(..));
                line.bytes().cycle().take(bytes).collect()
            }
        };
        record["user_data"] = json!({ "base64": STANDARD.encode(text) });
        record["serve"]["limits"] = json!({ "user_data": 1 << 20 });
        record.to_string()
    }
}

/// Allocated bytes and blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Heap {
    bytes: usize,
    blocks: usize,
}

impl Heap {
    fn now() -> Self {
        let stats = ALLOCATOR.stats();
        Self {
            bytes: stats.bytes_allocated - stats.bytes_deallocated,
            blocks: stats.allocations - stats.deallocations,
        }
    }

    fn since(self, earlier: Self) -> Self {
        let bytes = self.bytes.saturating_sub(earlier.bytes);
        Self { bytes, blocks: self.blocks.saturating_sub(earlier.blocks) }
    }

    fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, blocks: self.blocks + other.blocks }
    }
}

/// The cost of `vms` VMs after the first.
#[derive(Debug)]
struct Cost {
    vms: usize,
    /// Heap of the first VM, which includes everything that VMs share.
    first: Heap,
    /// Heap of the further VMs' records.
    records: Heap,
    /// Remaining heap of the further VMs: responses, mailboxes, and the tables of interner and store.
    served: Heap,
    /// Growth of the process's resident memory, in bytes.
    resident: usize,
    /// Time for rendering and publishing.
    rendering: Duration,
    /// Time from the first requests of the VMs until their dialects were rendered.
    asking: Duration,
    routes: usize,
    /// Bytes that `record_memory` counts for one VM with shared vendor-data.
    counted: usize,
}

impl Cost {
    /// Bytes one more VM takes without its record.
    fn served_per_vm(&self) -> usize {
        self.served.bytes / self.vms
    }

    /// Bytes one more VM takes with its record.
    fn per_vm(&self) -> usize {
        (self.served.bytes + self.records.bytes) / self.vms
    }
}

/// The part of the agent's state that grows with the number of VMs.
struct Node {
    keyring: Arc<Keyring>,
    mailboxes: Mailboxes,
    interner: Interner,
    content: OnDemand,
    held: Vec<(Arc<Record>, Arc<Responses>)>,
}

impl Node {
    /// Adds a VM. Returns the heap of its record, the time for rendering and publishing its responses, and the time for
    /// rendering what the VM asks for.
    fn take(&mut self, number: u32, load: Load<'_>) -> (Heap, Duration, Duration) {
        let text = load.record(number);
        let before = Heap::now();
        let mut record = Record::parse("vm.json", &text).expect("a good record").0;
        record.compact(|bytes| self.interner.bytes(bytes));
        let record = Arc::new(record);
        let kept = Heap::now().since(before);
        let start = Instant::now();
        let vm = VmState::of(
            &record,
            Arc::clone(&self.keyring),
            self.mailboxes.for_record(metadata_content::source::RecordSource::File, "vm.json", &record),
        );
        let mut responses = Arc::new(match load.asked {
            [] => dialect::render(&record, &mut self.interner, vm),
            _ => dialect::render_asked(&record, &mut self.interner, vm, Dialects::NONE),
        });
        self.content.store().publish(number, Arc::clone(&responses)).expect("a slot of the table");
        let published = Instant::now();
        if let [_, ..] = load.asked {
            let path = load.asked[number as usize % load.asked.len()];
            if let SlotState::Ready(fuller) = self.content.get(number, Host::Metadata, path) {
                responses = fuller;
            }
        }
        let (spent, asked) = (published - start, published.elapsed());
        // The first clone of a body allocates its reference count, as sending it would.
        for (_, _, route) in responses.routes() {
            if let Endpoint::Fixed(response) = route.endpoint() {
                drop(response.body().clone());
            }
        }
        self.held.push((record, responses));
        (kept, spent, asked)
    }
}

fn measure(vms: u32, load: Load<'_>) -> Cost {
    let resident = resident();
    let start = Heap::now();
    let mut node = Node {
        keyring: Arc::new(Keyring::ephemeral()),
        mailboxes: Mailboxes::in_memory(Outbox::detached()),
        interner: Interner::new(),
        content: OnDemand::new(Store::new(vms + 1)),
        held: Vec::with_capacity(vms as usize + 1),
    };
    node.take(vms, load);
    let first = Heap::now();
    let (mut records, mut rendering, mut asking) = (Heap::default(), Duration::ZERO, Duration::ZERO);
    for number in 0..vms {
        let (kept, spent, asked) = node.take(number, load);
        records = records.plus(kept);
        rendering += spent;
        asking += asked;
    }
    let all = Heap::now().since(first);
    Cost {
        vms: vms as usize,
        first: first.since(start),
        records,
        served: all.since(records),
        resident: self::resident().saturating_sub(resident),
        rendering,
        asking,
        routes: node.held[0].1.routes().count(),
        counted: {
            let mut own = (*node.held[0].0).clone();
            own.vendor_data = None;
            Weight::of(&own).alone()
        },
    }
}

/// Resident memory of the process, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("status of the process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number of KiB");
    kib << 10
}

fn print(name: &str, cost: &Cost, as_json: bool) {
    let rate = cost.vms as f64 / cost.rendering.as_secs_f64();
    if as_json {
        let line = json!({
            "name": name, "vms": cost.vms, "served_per_vm": cost.served_per_vm(), "routes": cost.routes,
            "record_per_vm": cost.records.bytes / cost.vms, "first_vm": cost.first.bytes,
            "counted_per_vm": cost.counted, "resident_per_vm": cost.resident / cost.vms, "records_per_second": rate,
            "first_request_us": cost.asking.as_secs_f64() * 1e6 / cost.vms as f64,
        });
        println!("{line}");
        return;
    }
    println!(
        "{name:22} {:6} VMs: {:7} bytes in {:4} blocks to serve one ({:3} routes), {:7} for its record, {:7} counted; \
         first VM {:7}; {:7} resident; {rate:6.0} records rendered a second; {:5.1} µs at the first request",
        cost.vms,
        cost.served_per_vm(),
        cost.served.blocks / cost.vms,
        cost.routes,
        cost.records.bytes / cost.vms,
        cost.counted,
        cost.first.bytes,
        cost.resident / cost.vms,
        cost.asking.as_secs_f64() * 1e6 / cost.vms as f64,
    );
}

fn main() -> ExitCode {
    let as_json = std::env::args().any(|word| word == "--json");
    let mut counts: Vec<u32> = std::env::args().filter_map(|word| word.parse().ok()).collect();
    if counts.is_empty() {
        counts.extend(BY_USER_DATA);
    }
    let mut less = Vec::new();
    let mut show = |name: &str, vms: u32, load: Load<'_>| {
        let cost = measure(vms, load);
        print(name, &cost, as_json);
        if cost.counted < cost.per_vm() {
            less.push(format!("{name}: {} bytes counted, {} taken", cost.counted, cost.per_vm()));
        }
        cost.served_per_vm()
    };
    let mut most = 0;
    for vms in [1_000, 10_000] {
        most = most.max(show("all dialects", vms, Load::default()));
    }
    for (name, asked) in ASKED {
        show(name, 4_000, Load { asked, ..Load::default() });
    }
    show("none", FEW, Load { dialects: Some(&[]), ..Load::default() });
    for dialect in Dialect::ALL {
        show(dialect.as_str(), FEW, Load { dialects: Some(&[*dialect]), ..Load::default() });
    }
    for bytes in USER_DATA {
        for (binary, kind) in [(false, "text"), (true, "gzip")] {
            let load = Load { user_data: Some(bytes), binary, ..Load::default() };
            for vms in &counts {
                show(&format!("{} KiB of {kind}", bytes >> 10), *vms, load);
            }
            if bytes == 64 << 10 {
                for dialect in Dialect::ALL {
                    let load = Load { dialects: Some(&[*dialect]), ..load };
                    show(&format!("64 KiB {kind}, {}", dialect.as_str()), BY_USER_DATA[0], load);
                }
            }
        }
    }
    less.iter().for_each(|line| eprintln!("`record_memory` counts less than is taken: {line}"));
    if most > MOST_PER_VM {
        eprintln!("{most} bytes to serve a VM: expected at most {MOST_PER_VM}");
    }
    if most > MOST_PER_VM || !less.is_empty() {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
