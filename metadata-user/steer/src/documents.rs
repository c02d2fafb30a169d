//! The kernel's tables of published documents: answers of single VMs, which the program `request` sends by itself.
//!
//! A common document is the answer of many VMs, and stands in the table once. A bit of each slot says whether it is
//! that slot's answer.
//!
//! A document belongs to an edition of its slot, and so do the slot's bits. [`Editions::close`] ends an edition at
//! once: the kernel then serves nothing of it any more, while the documents are still in the table.
//! [`DocumentTable::remove`] frees them after no program can use them.

use aya::Ebpf;
use aya::maps::{Array, HashMap, IterableMap as _, MapData, PerCpuArray, ProgramArray, RingBuf};
use metadata_common::answer::request::{RESPONSE_MIN, hash_of};
use metadata_common::maps::{
    AnswerRecord, COMMON_WORDS, DATE_BYTES, Document, DocumentKey, Edition, LONG_RESPONSE_BYTES,
    RESPONSE_BYTES, ServedDate, Slot, SlotToken, TOKEN_BYTES, name, program,
};
use metadata_common::siphash::SipKey;
use metadata_datapath::afxdp::CommonUseTable;
use metadata_datapath::stack::GuestDevices;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};

use super::SteerError;
use super::maps::{absent_is_fine, take};
use super::object::load_program;

/// The editions of all slots, shared by those who publish and those who withdraw.
#[derive(Clone)]
pub struct Editions(Arc<Mutex<EditionTable>>);

struct EditionTable {
    kernel: Array<MapData, [u64; 4]>,
    /// What the kernel's table holds, but for the state of buckets.
    known: Vec<Edition>,
}

impl EditionTable {
    fn set(&mut self, slot: Slot, edition: Edition) -> Result<(), SteerError> {
        // Replacing a record must not refill its bucket. A request that the kernel answers meanwhile is not charged.
        let kernel = &mut self.kernel;
        let set = kernel
            .get(&slot, 0)
            .and_then(|[.., full_at_ns]| kernel.set(slot, Edition { full_at_ns, ..edition }.to_words(), 0));
        set.map_err(|source| SteerError::map(name::EDITIONS, format!("set slot {slot}"), source))?;
        if let Some(known) = self.known.get_mut(slot as usize) {
            *known = edition;
        }
        Ok(())
    }

    fn get(&self, slot: Slot) -> Edition {
        self.known.get(slot as usize).copied().unwrap_or_default()
    }
}

impl Editions {
    /// Ends the slot's edition: from now on the kernel answers none of its requests, until an edition is opened.
    ///
    /// # Errors
    /// If the kernel refuses the change. Then it may still serve the edition until the date expires.
    pub fn close(&self, slot: Slot) -> Result<(), SteerError> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let edition = table.get(slot);
        table.set(slot, Edition { number: (edition.number | 1).wrapping_add(1), ..edition })
    }

    /// The slot's edition; closed ones are even.
    #[must_use]
    pub fn get(&self, slot: Slot) -> u32 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(slot).number
    }

    /// Opens the edition after the closed edition `closed`, for this many requests a second (0 for no limit), and at once.
    /// Returns false if the edition has changed meanwhile.
    ///
    /// # Errors
    /// If the kernel refuses the change.
    pub fn open(&self, slot: Slot, closed: u32, (per_second, burst): (u32, u32)) -> Result<bool, SteerError> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if closed & 1 != 0 || table.get(slot).number != closed {
            return Ok(false);
        }
        let edition = Edition { number: closed | 1, ..Edition::default() }.with_limit(per_second, burst);
        table.set(slot, edition).map(|()| true)
    }
}

/// The session tokens that guests use. A request with its slot's token may get a document that needs one.
pub struct SlotTokens {
    kernel: Mutex<Array<MapData, [u64; 9]>>,
    editions: Editions,
}

impl SlotTokens {
    /// Sets the token of a slot, which a worker has accepted. It is valid until a monotonic time in nanoseconds, in the
    /// edition that is open, or in the next one if none is. `from_end` is the number of bytes from the start of the token
    /// to the end of the request.
    ///
    /// # Errors
    /// If there is no such slot.
    pub fn set(
        &self,
        slot: Slot,
        token: &[u8; TOKEN_BYTES],
        from_end: u16,
        until_ns: u64,
    ) -> Result<(), SteerError> {
        let (edition, from_end) = (self.editions.get(slot) | 1, from_end.into());
        let token = SlotToken { until_ns, edition, from_end, words: token_words(token) };
        let mut kernel = self.kernel.lock().unwrap_or_else(PoisonError::into_inner);
        let set = kernel.set(slot, token.to_words(), 0);
        set.map_err(|source| SteerError::map(name::TOKENS, format!("set slot {slot}"), source))
    }
}

/// A response that the kernel can send.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelResponse {
    bytes: Box<[u8]>,
    content: u16,
    date: u16,
    sum: u16,
}

impl KernelResponse {
    /// Builds a response of this head, which ends with the line end of its last field, and this content. `None` if it is
    /// too long.
    #[must_use]
    pub fn new(head: &[u8], content: &[u8]) -> Option<Self> {
        const FIELD: &[u8] = b"Date: ";
        const END: &[u8] = b"\r\n\r\n";
        let date = head.len() + FIELD.len();
        let bytes = [head, FIELD, &[0; DATE_BYTES], END, content].concat();
        if !(RESPONSE_MIN..=LONG_RESPONSE_BYTES).contains(&bytes.len()) {
            return None;
        }
        let sum = sum(&bytes);
        Some(Self {
            content: u16::try_from(content.len()).ok()?,
            date: u16::try_from(date).ok()?,
            sum,
            bytes: bytes.into(),
        })
    }

    /// True for a response that may have no room in the frame of its request.
    fn is_long(&self) -> bool {
        self.bytes.len() > RESPONSE_BYTES
    }
}

/// The key of a response in the kernel's tables. Numbers are not used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyKey {
    number: u64,
    is_long: bool,
}

/// The kernel's tables of documents.
pub struct DocumentTable {
    documents: HashMap<MapData, [u64; 2], [u64; 3]>,
    common_uses: CommonUseTable,
    bodies: HashMap<MapData, u64, [u8; RESPONSE_BYTES]>,
    long_bodies: HashMap<MapData, u64, [u8; LONG_RESPONSE_BYTES]>,
    /// The number of the next body.
    next_body: u64,
    /// The kernel can send long responses, too.
    completes: bool,
    devices: GuestDevices,
    date: HashMap<MapData, u32, [u64; 5]>,
    counts: PerCpuArray<MapData, u64>,
    records: RingBuf<MapData>,
    /// Unless it is pinned, the kernel empties the table when its last descriptor is closed.
    program: ProgramArray<MapData>,
    editions: Editions,
    tokens: Arc<SlotTokens>,
    key: SipKey,
}

impl DocumentTable {
    /// Loads `request` behind `port`, and takes the tables out of a loaded object.
    pub(super) fn take(ebpf: &mut Ebpf, key: SipKey, devices: GuestDevices) -> Result<Self, SteerError> {
        let loaded = load_program(ebpf, program::REQUEST)?;
        let failed = |source| SteerError::load("request program's descriptor", source);
        let descriptor = loaded.fd().and_then(|fd| Ok(fd.try_clone()?)).map_err(failed)?;
        let mut entry: ProgramArray<MapData> = take(ebpf, name::REQUEST_PROGRAM)?;
        entry
            .set(0, &descriptor, 0)
            .map_err(|source| SteerError::map(name::REQUEST_PROGRAM, "enter the program", source))?;
        let kernel: Array<MapData, [u64; 4]> = take(ebpf, name::EDITIONS)?;
        let known = vec![Edition::default(); kernel.len() as usize];
        let common_uses: Array<MapData, [u64; COMMON_WORDS]> = take(ebpf, name::COMMON_USES)?;
        let common_uses = CommonUseTable::map(common_uses.map().fd().as_fd()).map_err(|source| {
            SteerError::map(name::COMMON_USES, "map into memory", io::Error::from(source))
        })?;
        let editions = Editions(Arc::new(Mutex::new(EditionTable { kernel, known })));
        let tokens = SlotTokens { kernel: Mutex::new(take(ebpf, name::TOKENS)?), editions: editions.clone() };
        Ok(Self {
            documents: take(ebpf, name::DOCUMENTS)?,
            common_uses,
            bodies: take(ebpf, name::BODIES)?,
            long_bodies: take(ebpf, name::LONG_BODIES)?,
            next_body: 0,
            completes: false,
            devices,
            date: take(ebpf, name::DATE)?,
            counts: take(ebpf, name::ANSWER_COUNTS)?,
            records: take(ebpf, name::ANSWER_RECORDS)?,
            program: entry,
            editions,
            tokens: Arc::new(tokens),
            key,
        })
    }

    /// Sets whether the kernel completes answers that have no room in the frame of their request.
    pub(super) fn set_completes(&mut self, completes: bool) {
        self.completes = completes;
    }

    /// Returns whether the kernel can send a response to a slot.
    #[must_use]
    pub fn can_send(&self, slot: Slot, response: &KernelResponse) -> bool {
        !response.is_long() || self.completes && self.devices.takes_long(slot)
    }

    /// The editions of all slots.
    #[must_use]
    pub fn editions(&self) -> &Editions {
        &self.editions
    }

    /// The session tokens of all slots.
    #[must_use]
    pub fn tokens(&self) -> Arc<SlotTokens> {
        Arc::clone(&self.tokens)
    }

    /// The hash by which the kernel finds a request; `None` if the kernel answers no request of this length.
    #[must_use]
    pub fn hash(&self, request: &[u8]) -> Option<u64> {
        hash_of(request, &self.key)
    }

    /// Adds the bytes of a response.
    ///
    /// # Errors
    /// If the table is full or the kernel has no memory.
    pub fn add_body(&mut self, response: &KernelResponse) -> Result<BodyKey, SteerError> {
        let key = BodyKey { number: self.next_body, is_long: response.is_long() };
        let failed = |map| move |source| SteerError::map(map, "add a response", source);
        if key.is_long {
            let bytes: [u8; LONG_RESPONSE_BYTES] = padded(&response.bytes);
            self.long_bodies.insert(key.number, bytes, 0).map_err(failed(name::LONG_BODIES))?;
        } else {
            let bytes: [u8; RESPONSE_BYTES] = padded(&response.bytes);
            self.bodies.insert(key.number, bytes, 0).map_err(failed(name::BODIES))?;
        }
        self.next_body += 1;
        Ok(key)
    }

    /// Adds a document with this body, which counts its answers by `counter`. `common` is its index if it
    /// is a common document.
    ///
    /// # Errors
    /// If the table is full or the kernel has no memory.
    pub fn add(
        &mut self,
        key: DocumentKey,
        body: BodyKey,
        response: &KernelResponse,
        counter: u16,
        common: Option<u16>,
    ) -> Result<(), SteerError> {
        // At most LONG_RESPONSE_BYTES.
        let length = response.bytes.len() as u16;
        let document = Document {
            body: body.number,
            length,
            content: response.content,
            date: response.date,
            sum: response.sum,
            counter,
            common: common.unwrap_or_default(),
            reserved: [0; 2],
        };
        self.documents
            .insert(key.to_words(), document.to_words(), 0)
            .map_err(|source| SteerError::map(name::DOCUMENTS, "add a document", source))
    }

    /// Begins an edition of a slot, in which it has no common documents yet.
    pub fn begin_common(&self, slot: Slot, edition: u32) {
        self.common_uses.begin(slot, edition);
    }

    /// Lets the kernel answer the slot's requests with the common document of this index, too.
    pub fn use_common(&self, slot: Slot, index: u16) {
        self.common_uses.add(slot, index);
    }

    /// Ends the use of the common document of this index for all slots.
    pub fn withdraw_common(&self, index: u16) {
        self.common_uses.forget(index);
    }

    /// Removes documents and bodies, after waiting until no program can use them. The documents must belong to closed
    /// editions, or be withdrawn.
    ///
    /// # Errors
    /// If the kernel refuses a removal.
    pub fn remove(&mut self, documents: &[DocumentKey], bodies: &[BodyKey]) -> Result<(), SteerError> {
        // Programs run inside an RCU read-side section, and the kernel uses the memory of a removed element again at
        // once. A program that has found a document would send another VM's.
        grace_period();
        for key in documents {
            absent_is_fine(self.documents.remove(&key.to_words()))
                .map_err(|source| SteerError::map(name::DOCUMENTS, "remove a document", source))?;
        }
        for BodyKey { number, is_long } in bodies {
            let removed = if *is_long { self.long_bodies.remove(number) } else { self.bodies.remove(number) };
            absent_is_fine(removed)
                .map_err(|source| SteerError::map(name::BODIES, "remove a response", source))?;
        }
        Ok(())
    }

    /// Sets the value of `Date`, until when it is valid, and whether answers are recorded.
    ///
    /// # Errors
    /// If the kernel refuses the change.
    pub fn set_date(
        &mut self,
        text: [u8; DATE_BYTES],
        until_ns: u64,
        records: bool,
    ) -> Result<(), SteerError> {
        let date = ServedDate { text, records: records.into(), sum: sum(&text), until_ns };
        self.date.insert(0, date.to_words(), 0).map_err(|source| SteerError::map(name::DATE, "set", source))
    }

    /// Takes `request` away from `port`, and with it the memory of all tables that the programs alone still use.
    ///
    /// # Errors
    /// If the kernel refuses the change.
    pub fn end(mut self) -> Result<(), SteerError> {
        let removed = self.program.clear_index(&0);
        removed.map_err(|source| SteerError::map(name::REQUEST_PROGRAM, "remove the program", source))
    }

    /// The number of answers that a counter has counted.
    ///
    /// # Errors
    /// If there is no such counter.
    pub fn count(&self, counter: u16) -> Result<u64, SteerError> {
        let counts = self.counts.get(&counter.into(), 0);
        let counts = counts.map_err(|source| SteerError::map(name::ANSWER_COUNTS, "read", source))?;
        Ok(counts.iter().copied().fold(0, u64::wrapping_add))
    }

    /// The next record of an answer.
    pub fn next_record(&mut self) -> Option<AnswerRecord> {
        AnswerRecord::from_bytes(&self.records.next()?)
    }
}

/// A value of a table, with zeros after the bytes.
fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut value = [0; N];
    value.iter_mut().zip(bytes).for_each(|(place, byte)| *place = *byte);
    value
}

/// The words of a token.
fn token_words(token: &[u8; TOKEN_BYTES]) -> [u64; TOKEN_BYTES / 8] {
    let (words, _) = token.as_chunks();
    std::array::from_fn(|at| u64::from_ne_bytes(words[at]))
}

/// Waits until every program that runs now has ended (`synchronize_rcu`, which `membarrier(2)` calls). Kernels that do
/// not have it for all threads get a time that no program can take.
fn grace_period() {
    use rustix::thread::{MembarrierCommand, membarrier};
    if membarrier(MembarrierCommand::Global).is_err() {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

/// The folded sum of 16-bit words in wire order (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|pair| u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])));
    let mut sum: u64 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn a_sum_is_that_of_the_words_in_their_order_on_the_wire() {
        for (bytes, expected) in [
            (&b""[..], 0),
            (&[0x12], 0x1200),
            (&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7], 0xddf2),
            (&[0xff; 17], 0xff00),
            (&[0x80, 0x01, 0x80, 0x01], 0x0003),
        ] {
            assert_eq!(sum(bytes), expected, "{bytes:02x?}");
        }
    }
}
