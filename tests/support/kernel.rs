//! Answers frames before a stack receives them, like the kernel: runs the code of the program `port` with a table in
//! this process.

use metadata_common::answer::request::long::{self, AnswerRest, CONTENT_AT, SUM_AT};
use metadata_common::answer::request::{
    AnswerableRequest, ConnectionEntry, EditionEntry, PublishedDocuments, TokenEntry, Words, find, hash_of,
    write,
};
use metadata_common::answer::{Entry, Ledger, Reply, answer};
use metadata_common::cookie::{CookieKey, Flow};
use metadata_common::maps::{
    ANSWER_TCP, AllSent, AnswerRecord, AnsweredConnection, DATE_BYTES, Document, Edition,
    FIN_ENDS_BOTH_KERNEL, RESPONSE_BYTES, ServedDate, Slot,
};
use metadata_common::siphash::SipKey;
use metadata_common::verdict::Verdict;
use metadata_common::wire::ethernet;
use metadata_datapath::stack::{
    AckLedger, DisplacedConnection, KernelReceipt, KernelSegment, KernelTurn, Transmit,
};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

const REQUEST_KEY: SipKey = SipKey([5, 6]);

/// The table that kernel and stack share.
#[derive(Clone, Debug)]
pub struct Board(Arc<Mutex<Vec<AllSent>>>, Arc<Mutex<HashMap<u32, AnsweredConnection>>>);

/// The kernel's side of the table.
#[derive(Clone)]
pub struct Kernel {
    board: Board,
    key: CookieKey,
    /// A deliberate defect: the kernel treats every entry as not held.
    pub ignores_held: bool,
    /// Numbers of SYNs answered, acknowledgements recorded, FINs answered, and requests answered.
    pub taken: [u64; 4],
    /// The published responses with zeros as `Date`, by the hash of their request.
    published: HashMap<u64, Vec<u8>>,
}

impl Board {
    /// A table with this many entries. Flows with the same index overwrite each other.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![AllSent::default(); places])), Arc::default())
    }

    /// What the kernel knows of the last connection that it has answered at an index.
    fn answered(&self, index: u32) -> Option<AnsweredConnection> {
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner).len() as u32;
        self.1.lock().unwrap_or_else(PoisonError::into_inner).get(&(index % places)).copied()
    }

    fn set_answered(&self, index: u32, connection: AnsweredConnection) {
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner).len() as u32;
        self.1.lock().unwrap_or_else(PoisonError::into_inner).insert(index % places, connection);
    }

    fn with<T>(&self, index: u32, f: impl FnOnce(&mut AllSent) -> T) -> T {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let places = entries.len();
        f(&mut entries[index as usize % places])
    }

    /// The entries of connections that the stack has posted.
    #[must_use]
    pub fn entries(&self) -> Vec<AllSent> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_posted = |entry: &AllSent| entry.flow != 0 && entry.finished != FIN_ENDS_BOTH_KERNEL;
        entries.iter().copied().filter(is_posted).collect()
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

    fn leave(&mut self, flow: Flow) {
        self.with(flow.index(), |place| place.held = place.held.checked_sub(1).expect("it was held"));
    }

    fn is_opened(&self, flow: Flow) -> bool {
        self.with(flow.index(), |place| place.opened == flow.mark())
    }

    fn post(&mut self, flow: Flow, entry: AllSent) -> Option<DisplacedConnection> {
        self.with(flow.index(), |place| {
            if is_kernels(place) {
                return None;
            }
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

    fn kernel_turn(&self, flow: Flow, segment: KernelSegment) -> KernelTurn {
        let answered = self.answered(flow.index()).filter(|answered| answered.flow == flow.number());
        self.with(flow.index(), |place| {
            if place.flow != flow.number() || !is_kernels(place) {
                return KernelTurn::Unknown;
            }
            KernelTurn::after(place, flow.mark(), segment, answered)
        })
    }

    fn take_over(&mut self, flow: Flow, segment: KernelSegment) -> bool {
        let is_stacks = self.kernel_turn(flow, segment).is_stacks();
        if is_stacks {
            self.withdraw(flow);
        }
        is_stacks
    }

    fn reopen(&mut self, flow: Flow) {
        self.with(flow.index(), |place| {
            if place.flow == flow.number() && is_kernels(place) {
                place.opened = flow.mark();
            }
        });
    }

    fn withdraw(&mut self, flow: Flow) {
        self.with(flow.index(), |place| {
            if place.flow == flow.number() {
                place.flow = 0;
            }
        });
    }
}

/// True for a connection that the kernel has answered and that is not over.
fn is_kernels(entry: &AllSent) -> bool {
    entry.flow != 0 && entry.finished == FIN_ENDS_BOTH_KERNEL && entry.closed != entry.sent
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

    fn own(&self, posted: AllSent) {
        self.board.with(self.index, |entry| *entry = AllSent { held: entry.held, ..posted });
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
        Self { board, key, ignores_held: false, taken: [0; 4], published: HashMap::new() }
    }

    /// Publishes the response to a request, of this head and content. The kernel then answers about half of such requests,
    /// chosen by their sequence number.
    pub fn publish(&mut self, request: &[u8], head: &[u8], content: &[u8]) {
        let hash = hash_of(request, &REQUEST_KEY).expect("a short request");
        self.published.insert(hash, [head, b"Date: ", &[0; DATE_BYTES], b"\r\n\r\n", content].concat());
    }

    /// Answers a request from the published documents.
    fn answers(&mut self, slot: Slot, frame: &[u8]) -> Option<Vec<u8>> {
        let [_, _, _, seq]: [u8; 4] = *frame.get(38..42)?.first_chunk()?;
        if self.published.is_empty() || seq & 2 == 0 {
            return None;
        }
        let mut request = AnswerableRequest::default();
        let mut copy = frame.to_vec();
        find(&mut copy[..], slot, 0, self, &mut request)?;
        if request.is_long() {
            return Some(self.complete(frame, &request));
        }
        let mut answer = vec![0; request.frame_length()];
        write(&mut answer[..], &request, self).expect("the frame is long enough");
        Some(answer)
    }

    /// Begins an answer, and completes it like the classifier `request_tcx`.
    fn complete(&self, frame: &[u8], request: &AnswerableRequest) -> Vec<u8> {
        let mut answer = frame.to_vec();
        long::begin(&mut answer[..], request, self).expect("each request leaves the room");
        answer[..6].copy_from_slice(&frame[6..12]);
        let rest = AnswerRest::read(&answer[..]).expect("a begun answer");
        let (bytes, date) = (&self.published[&rest.body], self.date().expect("it is always set"));
        answer.resize(CONTENT_AT, 0);
        answer.extend(bytes);
        answer[CONTENT_AT + rest.date..][..DATE_BYTES].copy_from_slice(&date.text);
        answer[SUM_AT..][..2].copy_from_slice(&rest.checksum(&date));
        answer
    }

    /// Processes a frame. Returns false if the stack must receive it.
    pub fn takes(&mut self, slot: Slot, frame: &[u8], out: &mut dyn Transmit) -> bool {
        let steered = match frame.get(ethernet::TYPE..ethernet::HEADER) {
            Some([0x08, 0x00]) if frame.get(23) == Some(&6) => Verdict::SteerIpv4Tcp,
            Some([0x86, 0xdd]) if frame.get(20) == Some(&6) => Verdict::SteerIpv6Tcp,
            _ => return false,
        };
        if steered == Verdict::SteerIpv4Tcp
            && let Some(answer) = self.answers(slot, frame)
        {
            self.taken[3] += 1;
            out.send(&answer);
            return true;
        }
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

/// An entry of `ANSWERED` in a [`Kernel`].
#[derive(Debug)]
pub struct AnsweredEntry(Board, u32);

impl ConnectionEntry for AnsweredEntry {
    fn load(&self) -> AnsweredConnection {
        self.0.answered(self.1).unwrap_or_default()
    }

    fn store(&self, connection: AnsweredConnection) {
        self.0.set_answered(self.1, connection);
    }
}

/// An edition without a limit.
#[derive(Clone, Copy, Debug)]
pub struct OpenEdition;

impl EditionEntry for OpenEdition {
    fn load(&self) -> Edition {
        Edition { number: 1, ..Edition::default() }
    }

    fn charge(&self, _: u64) {}
}

/// An entry without a token.
#[derive(Clone, Copy, Debug)]
pub struct NoToken;

impl TokenEntry for NoToken {
    fn until_ns(&self) -> u64 {
        0
    }

    fn edition(&self) -> u32 {
        0
    }

    fn distance_from_end(&self) -> u32 {
        0
    }

    fn word(&self, _: usize) -> u64 {
        0
    }
}

/// The bytes of a published response.
#[derive(Debug)]
pub struct PublishedBytes(Vec<u8>);

impl Words for PublishedBytes {
    fn word(&self, offset: usize) -> [u8; 8] {
        *self.0[offset..].first_chunk().expect("eight bytes")
    }
}

/// The sum of 16-bit words (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let pairs = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum: u32 = pairs.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

impl PublishedDocuments for Kernel {
    type Bytes = PublishedBytes;
    type Connection = AnsweredEntry;
    type Edition = OpenEdition;
    type Token = NoToken;

    fn request_key(&self) -> SipKey {
        REQUEST_KEY
    }

    fn edition(&self, _: Slot) -> Option<OpenEdition> {
        Some(OpenEdition)
    }

    fn token(&self, _: Slot) -> Option<NoToken> {
        Some(NoToken)
    }

    fn document(&self, _: Slot, _: u32, request: u64, _: bool) -> Option<Document> {
        let response = self.published.get(&request)?;
        let date = response.windows(DATE_BYTES).position(|part| part == [0; DATE_BYTES])?;
        let (length, date) = (response.len() as u16, date as u16);
        Some(Document { body: request, length, date, sum: sum(response), ..Document::default() })
    }

    fn bytes(&self, document: &Document) -> Option<PublishedBytes> {
        let mut bytes = self.published.get(&document.body)?.clone();
        bytes.resize(RESPONSE_BYTES, 0);
        Some(PublishedBytes(bytes))
    }

    fn date(&self) -> Option<ServedDate> {
        let text = *b"Sun, 06 Nov 1994 08:49:37 GMT";
        Some(ServedDate { text, records: 0, sum: sum(&text), until_ns: u64::MAX })
    }

    fn connection(&self, index: u32) -> Option<AnsweredEntry> {
        Some(AnsweredEntry(self.board.clone(), index))
    }

    fn has_room(&self) -> bool {
        true
    }

    fn record(&self, _: AnswerRecord) {}

    fn count(&self, _: u16) {}
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

    fn own(&self, posted: AllSent) {
        self.0.set(AllSent { held: self.0.get().held, ..posted });
    }
}
