//! Answers frames before a stack receives them, like the kernel: runs the code of the program `port` with a table in
//! this process.

use metadata_common::answer::{Entry, Ledger, Reply, answer};
use metadata_common::cookie::{CookieKey, Flow};
use metadata_common::maps::{ANSWER_TCP, AllSent, Slot};
use metadata_common::verdict::Verdict;
use metadata_common::wire::ethernet;
use metadata_datapath::stack::{AckLedger, DisplacedConnection, KernelReceipt, Transmit};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

/// The table that kernel and stack share.
#[derive(Clone, Debug)]
pub struct Board(Arc<Mutex<Vec<AllSent>>>);

/// The kernel's side of the table.
#[derive(Clone)]
pub struct Kernel {
    board: Board,
    key: CookieKey,
    /// A deliberate defect: the kernel treats every entry as not held.
    pub ignores_held: bool,
    /// Numbers of SYNs answered, acknowledgements recorded, and FINs answered.
    pub taken: [u64; 3],
}

impl Board {
    /// A table with this many entries. Flows with the same index overwrite each other.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![AllSent::default(); places])))
    }

    fn with<T>(&self, index: u32, f: impl FnOnce(&mut AllSent) -> T) -> T {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let places = entries.len();
        f(&mut entries[index as usize % places])
    }

    /// The entries of posted connections.
    #[must_use]
    pub fn entries(&self) -> Vec<AllSent> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter().copied().filter(|entry| entry.flow != 0).collect()
    }

    /// The number of held connections over all entries.
    #[must_use]
    pub fn held(&self) -> u32 {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter().map(|entry| entry.held).sum()
    }

    /// Changes the entries of all posted connections.
    pub fn spoil(&self, f: impl Fn(&mut AllSent)) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter_mut().filter(|entry| entry.flow != 0).for_each(f);
    }
}

impl AckLedger for Board {
    fn hold(&mut self, flow: Flow) {
        self.with(flow.index(), |place| *place = AllSent { held: place.held + 1, opened: 0, ..*place });
    }

    fn release(&mut self, flow: Flow) {
        self.withdraw(flow);
        self.with(flow.index(), |place| place.held = place.held.checked_sub(1).expect("it was held"));
    }

    fn is_opened(&self, flow: Flow) -> bool {
        self.with(flow.index(), |place| place.opened == flow.mark())
    }

    fn post(&mut self, flow: Flow, entry: AllSent) -> Option<DisplacedConnection> {
        self.with(flow.index(), |place| {
            let AllSent { flow: before, acknowledged, closed, opened, held, .. } = *place;
            *place = AllSent { opened, held, ..entry };
            let displaced =
                DisplacedConnection { flow: before, heard: KernelReceipt { acknowledged, closed } };
            (before != 0 && before != entry.flow).then_some(displaced)
        })
    }

    fn look(&self, flow: Flow) -> Option<KernelReceipt> {
        self.with(flow.index(), |place| {
            let heard = KernelReceipt { acknowledged: place.acknowledged, closed: place.closed };
            (place.flow == flow.number()).then_some(heard)
        })
    }

    fn withdraw(&mut self, flow: Flow) {
        self.with(flow.index(), |place| {
            if place.flow == flow.number() {
                place.flow = 0;
            }
        });
    }
}

/// An entry of the table, as the kernel accesses it.
#[derive(Debug)]
pub struct Place {
    board: Board,
    index: u32,
    ignores_held: bool,
}

impl Entry for Place {
    fn load(&self) -> AllSent {
        let held = |held| if self.ignores_held { 0 } else { held };
        self.board.with(self.index, |entry| AllSent { held: held(entry.held), ..*entry })
    }

    fn acknowledge(&self, sent: u32) {
        self.board.with(self.index, |entry| entry.acknowledged = sent);
    }

    fn close(&self, sent: u32) {
        self.board.with(self.index, |entry| entry.closed = sent);
    }

    fn open(&self, mark: u16) {
        self.board.with(self.index, |entry| entry.opened = mark);
    }
}

impl Ledger for Kernel {
    type Entry = Place;

    fn key(&self) -> CookieKey {
        self.key
    }

    fn entry(&self, index: u32) -> Option<Place> {
        Some(Place { board: self.board.clone(), index, ignores_held: self.ignores_held })
    }
}

impl Kernel {
    /// A kernel that shares this table and key with a stack.
    #[must_use]
    pub fn new(board: Board, key: CookieKey) -> Self {
        Self { board, key, ignores_held: false, taken: [0; 3] }
    }

    /// Processes a frame. Returns false if the stack must receive it.
    pub fn takes(&mut self, slot: Slot, frame: &[u8], out: &mut dyn Transmit) -> bool {
        let steered = match frame.get(ethernet::TYPE..ethernet::HEADER) {
            Some([0x08, 0x00]) if frame.get(23) == Some(&6) => Verdict::SteerIpv4Tcp,
            Some([0x86, 0xdd]) if frame.get(20) == Some(&6) => Verdict::SteerIpv6Tcp,
            _ => return false,
        };
        let mut frame = frame.to_vec();
        let (verdict, length) = match answer(&mut frame[..], steered, slot, ANSWER_TCP, self) {
            Some(Reply::Send(verdict, length)) => (verdict, length),
            Some(Reply::Absorb(verdict)) => (verdict, 0),
            None => return false,
        };
        let kinds = [Verdict::AnswerSyn, Verdict::AbsorbAck, Verdict::AnswerFin];
        let kind = kinds.iter().position(|kind| *kind == verdict).expect("a verdict about TCP");
        self.taken[kind] += 1;
        if length > 0 {
            out.send(&frame[..length]);
        }
        true
    }
}

// A table in memory instead of the kernel's map `ALL_SENT`, for tests of `answer`.

/// The handshake key of all runs.
pub const KEY: CookieKey = CookieKey([0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210]);

/// A table for [`KEY`], initially empty.
#[derive(Debug, Default)]
pub struct Book {
    entries: RefCell<HashMap<u32, Rc<Cell<AllSent>>>>,
}

impl Book {
    /// Posts a connection as user space would.
    pub fn post(&self, flow: Flow, said: AllSent) {
        self.entries.borrow_mut().insert(flow.index(), Rc::new(Cell::new(said)));
    }

    /// The entry at a connection's index.
    #[must_use]
    pub fn posted(&self, flow: Flow) -> AllSent {
        self.entries.borrow().get(&flow.index()).map(|entry| entry.get()).unwrap_or_default()
    }
}

/// One entry of a [`Book`].
#[derive(Debug)]
pub struct Line(Rc<Cell<AllSent>>);

impl Ledger for Book {
    type Entry = Line;

    fn key(&self) -> CookieKey {
        KEY
    }

    fn entry(&self, index: u32) -> Option<Line> {
        Some(Line(Rc::clone(self.entries.borrow_mut().entry(index).or_default())))
    }
}

impl Entry for Line {
    fn load(&self) -> AllSent {
        self.0.get()
    }

    fn acknowledge(&self, sent: u32) {
        self.0.set(AllSent { acknowledged: sent, ..self.0.get() });
    }

    fn close(&self, sent: u32) {
        self.0.set(AllSent { closed: sent, ..self.0.get() });
    }

    fn open(&self, mark: u16) {
        self.0.set(AllSent { opened: mark, ..self.0.get() });
    }
}
