//! A table in memory instead of the kernel's map `ALL_SENT`, for tests of `answer`.

use metadata_common::answer::{Entry, Ledger};
use metadata_common::cookie::{CookieKey, Flow};
use metadata_common::maps::AllSent;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

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
