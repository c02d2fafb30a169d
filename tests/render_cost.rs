//! What a VM costs in memory, and how fast records are rendered:
//! `cargo bench -p xdp-imds-tests --bench render_cost`.
//!
//! The VMs are [`support::typical`]. What the first VM brings is there once for all; what each further one adds is
//! its own. Fails above [`MOST_PER_VM`].

use std::alloc::System;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_user::dialect;
use metadata_user::mailbox::Mailboxes;
use metadata_user::record::{Dialect, Record};
use metadata_user::sink::Outbox;
use metadata_user::store::{Endpoint, Interner, Responses, Store, Vm};
use metadata_user::token::Keyring;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::typical;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Octets one VM may cost beyond what it shares with others, all dialects rendered: responses, mailbox, and
/// its part of the tables that hold them. The record they are rendered from comes on top of it.
const MOST_PER_VM: usize = 32 << 10;
/// VMs of the table by dialect.
const FEW: u32 = 1_000;

/// Octets and blocks allocated now.
#[derive(Clone, Copy, Debug, Default)]
struct Heap {
    octets: usize,
    blocks: usize,
}

impl Heap {
    fn now() -> Self {
        let stats = ALLOCATOR.stats();
        Self {
            octets: stats.bytes_allocated - stats.bytes_deallocated,
            blocks: stats.allocations - stats.deallocations,
        }
    }

    fn since(self, earlier: Self) -> Self {
        let octets = self.octets.saturating_sub(earlier.octets);
        Self { octets, blocks: self.blocks.saturating_sub(earlier.blocks) }
    }

    fn plus(self, other: Self) -> Self {
        Self { octets: self.octets + other.octets, blocks: self.blocks + other.blocks }
    }
}

/// What some VMs cost.
#[derive(Debug)]
struct Cost {
    vms: usize,
    /// Of what the first VM brought.
    first: Heap,
    /// Of the further VMs' records.
    records: Heap,
    /// Of everything else of them: responses, mailboxes, and the tables of interner and store.
    served: Heap,
    /// What the process grew by, in octets.
    resident: usize,
    /// Spent on rendering and publishing.
    rendering: Duration,
    routes: usize,
}

impl Cost {
    /// What one more VM costs to serve, in octets.
    fn served_per_vm(&self) -> usize {
        self.served.octets / self.vms
    }
}

/// The agent's state as far as it grows with VMs.
struct Node {
    keyring: Arc<Keyring>,
    mailboxes: Mailboxes,
    interner: Interner,
    store: Store,
    held: Vec<(Arc<Record>, Arc<Responses>)>,
}

impl Node {
    /// Takes a VM in; the heap its record took, and the time its responses did.
    fn take(&mut self, number: u32, dialects: Option<&[Dialect]>) -> (Heap, Duration) {
        let text = typical::record(number, dialects).to_string();
        let before = Heap::now();
        let mut record = Record::parse("vm.json", &text).expect("a good record").0;
        record.compact(|octets| self.interner.octets(octets));
        let record = Arc::new(record);
        let kept = Heap::now().since(before);
        let start = Instant::now();
        let vm = Vm::of(&record, Arc::clone(&self.keyring), self.mailboxes.for_record(&record));
        let responses = Arc::new(dialect::render(&record, &mut self.interner, vm));
        self.store.publish(number, Arc::clone(&responses)).expect("a slot of the table");
        let spent = start.elapsed();
        // A body that is sent for the first time begins to count its references.
        for (_, _, route) in responses.routes() {
            if let Endpoint::Fixed(response) = route.endpoint() {
                drop(response.body().clone());
            }
        }
        self.held.push((record, responses));
        (kept, spent)
    }
}

fn measure(vms: u32, dialects: Option<&[Dialect]>) -> Cost {
    let resident = resident();
    let start = Heap::now();
    let mut node = Node {
        keyring: Arc::new(Keyring::ephemeral()),
        mailboxes: Mailboxes::in_memory(Outbox::detached()),
        interner: Interner::new(),
        store: Store::new(vms + 1),
        held: Vec::with_capacity(vms as usize + 1),
    };
    node.take(vms, dialects);
    let first = Heap::now();
    let (mut records, mut rendering) = (Heap::default(), Duration::ZERO);
    for number in 0..vms {
        let (kept, spent) = node.take(number, dialects);
        records = records.plus(kept);
        rendering += spent;
    }
    let all = Heap::now().since(first);
    Cost {
        vms: vms as usize,
        first: first.since(start),
        records,
        served: all.since(records),
        resident: self::resident().saturating_sub(resident),
        rendering,
        routes: node.held[0].1.routes().count(),
    }
}

/// Octets of memory the process has.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("status of the process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number of KiB");
    kib << 10
}

fn print(name: &str, cost: &Cost) {
    println!(
        "{name:14} {:6} VMs: {:6} octets in {:4} blocks to serve one ({:3} routes), {:5} for its record; \
         first VM {:7}; {:6} resident; {:6.0} records rendered a second",
        cost.vms,
        cost.served_per_vm(),
        cost.served.blocks / cost.vms,
        cost.routes,
        cost.records.octets / cost.vms,
        cost.first.octets,
        cost.resident / cost.vms,
        cost.vms as f64 / cost.rendering.as_secs_f64(),
    );
}

fn main() -> ExitCode {
    let mut most = 0;
    for vms in [1_000, 10_000] {
        let cost = measure(vms, None);
        print("all dialects", &cost);
        most = most.max(cost.served_per_vm());
    }
    print("none", &measure(FEW, Some(&[])));
    for dialect in Dialect::ALL {
        print(dialect.as_str(), &measure(FEW, Some(&[*dialect])));
    }
    if most > MOST_PER_VM {
        eprintln!("{most} octets to serve a VM: expected at most {MOST_PER_VM}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
