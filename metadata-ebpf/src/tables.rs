//! The maps, and the lookups of `metadata-common` in them.

use aya_ebpf::Global;
use aya_ebpf::bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, BPF_RB_AVAIL_DATA, BPF_RB_NO_WAKEUP};
use aya_ebpf::helpers::generated::{bpf_ktime_get_ns, bpf_xdp_adjust_head};
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, DevMap, DevMapHash, HashMap, PerCpuArray, ProgramArray, RingBuf, XskMap};
use aya_ebpf::programs::{TcContext, XdpContext};
use metadata_common::answer;
use metadata_common::answer::request::{
    AnswerableRequest, ConnectionEntry, EditionEntry, PublishedDocuments, TokenEntry, Words,
};
use metadata_common::bucket;
use metadata_common::classify::{Reader as _, ServedAddresses};
use metadata_common::cookie::{CookieKey, Flow};
use metadata_common::decide;
use metadata_common::drain;
use metadata_common::mac::Mac;
use metadata_common::maps::{
    self, AllSent, AnswerRecord, AnsweredConnection, BARE, COMMON_BITS, COMMON_WORDS, CommonUses, Document,
    DocumentKey, EVENT_BYTES, Edition, Guest, HUB_QUEUES, IN_FRONT, Identity, IdentityKey, InheritedState,
    LONG_RESPONSE_BYTES, MAX_ANSWER_COUNTERS, MAX_BODIES, MAX_COMMON_DOCUMENTS, MAX_DOCUMENTS, MAX_DRAINING,
    MAX_HUBS, MAX_LONG_BODIES, MAX_PORTS, MAX_SERVED, MAX_SLOTS, NUMBER_BYTES, NUMBER_WORD, PortKey,
    RECORD_BYTES, RECORD_RESERVE, RESPONSE_BYTES, SERVED, ServedDate, Slot, SlotToken,
};
use metadata_common::siphash::SipKey;
use metadata_common::trace::{Scratch, Trace};
use metadata_common::verdict::Verdict;

use crate::frame::Frame;
use crate::plain;

/// The number of the namespace of this instance, or [`IN_FRONT`]; set by the loader.
#[unsafe(no_mangle)]
static NETNS: Global<u32> = Global::new(0);

/// The handshake key; set by the loader.
#[unsafe(no_mangle)]
static COOKIE_KEY: Global<[u64; 2]> = Global::new([0; 2]);

/// The key of the hashes of requests; set by the loader.
#[unsafe(no_mangle)]
static REQUEST_KEY: Global<[u64; 2]> = Global::new([0; 2]);

/// 1 if this agent answers requests in the kernel; set by the loader.
#[unsafe(no_mangle)]
static ANSWERS_REQUESTS: Global<u32> = Global::new(0);

/// The number of the hub of this instance of `socket`; set by the loader.
#[unsafe(no_mangle)]
static HUB: Global<u32> = Global::new(0);

/// The hub of this instance of `socket`.
#[inline(always)]
pub(crate) fn own_hub() -> u32 {
    HUB.load()
}

#[map]
static PORTS: HashMap<PortKey, maps::Port> = HashMap::with_max_entries(MAX_PORTS, 0);
#[map]
static IDENTITIES: HashMap<IdentityKey, Identity> = HashMap::with_max_entries(MAX_SLOTS, 0);
#[map]
static GUESTS: Array<u64> = Array::with_max_entries(MAX_SLOTS, 0);
#[map]
pub(crate) static GUEST_DEVICES: DevMapHash = DevMapHash::with_max_entries(MAX_SLOTS, 0);
#[map]
static HOME_DEVICES: Array<u32> = Array::with_max_entries(MAX_SLOTS, 0);
#[map]
pub(crate) static HUBS: DevMap = DevMap::with_max_entries(MAX_HUBS, 0);
#[map]
pub(crate) static HUB_DEVICES: Array<u32> = Array::with_max_entries(MAX_HUBS, 0);
#[map]
pub(crate) static SOCKETS: XskMap = XskMap::with_max_entries(MAX_HUBS * HUB_QUEUES, 0);
#[map]
static SERVED_V4: HashMap<[u8; 4], u32> = HashMap::with_max_entries(MAX_SERVED, 0);
#[map]
static SERVED_V6: HashMap<[u8; 16], u32> = HashMap::with_max_entries(MAX_SERVED, 0);
#[map]
static ALL_SENT: Array<AllSent> = Array::with_max_entries(maps::ALL_SENT, BPF_F_MMAPABLE);
#[map]
static DRAINING: HashMap<u64, u32> = HashMap::with_max_entries(MAX_DRAINING, BPF_F_NO_PREALLOC);
#[map]
static EDITIONS: Array<Edition> = Array::with_max_entries(MAX_SLOTS, 0);
#[map]
static DOCUMENTS: HashMap<DocumentKey, Document> =
    HashMap::with_max_entries(MAX_DOCUMENTS, BPF_F_NO_PREALLOC);
#[map]
static COMMON_USES: Array<[u64; COMMON_WORDS]> = Array::with_max_entries(MAX_SLOTS, BPF_F_MMAPABLE);
#[map]
static TOKENS: Array<SlotToken> = Array::with_max_entries(MAX_SLOTS, 0);
#[map]
static BODIES: HashMap<u64, [u8; RESPONSE_BYTES]> = HashMap::with_max_entries(MAX_BODIES, BPF_F_NO_PREALLOC);
#[map]
static LONG_BODIES: HashMap<u64, [u8; LONG_RESPONSE_BYTES]> =
    HashMap::with_max_entries(MAX_LONG_BODIES, BPF_F_NO_PREALLOC);
#[map]
static DATE: HashMap<u32, ServedDate> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);
#[map]
static ANSWERED: Array<AnsweredConnection> = Array::with_max_entries(maps::ALL_SENT, BPF_F_MMAPABLE);
#[map]
static ANSWER_COUNTS: PerCpuArray<u64> = PerCpuArray::with_max_entries(MAX_ANSWER_COUNTERS, 0);
#[map]
static ANSWER_RECORDS: RingBuf = RingBuf::with_byte_size(RECORD_BYTES, 0);
#[map]
pub(crate) static HANDED: PerCpuArray<HandedFrame> = PerCpuArray::with_max_entries(1, 0);
#[map]
pub(crate) static ANSWERING: PerCpuArray<AnswerableRequest> = PerCpuArray::with_max_entries(1, 0);
#[map]
static REQUEST_PROGRAM: ProgramArray = ProgramArray::with_max_entries(1, 0);
#[map]
static AGENT: Array<InheritedState> = Array::with_max_entries(1, 0);
#[map]
pub(crate) static TRACE: Array<Trace> = Array::with_max_entries(1, 0);
#[map]
pub(crate) static EVENTS: RingBuf = RingBuf::with_byte_size(EVENT_BYTES, 0);
#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Verdict::COUNT, 0);
#[map]
pub(crate) static TRACED: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

/// Adds one to a verdict's counter. Returns this CPU's new count.
#[inline(always)]
pub(crate) fn count(verdict: Verdict) -> u64 {
    count_index(verdict.index())
}

/// Adds one to the counter of [`Verdict::index`]. Returns this CPU's new count.
#[inline(always)]
pub(crate) fn count_index(index: u32) -> u64 {
    let Some(counter) = COUNTERS.get_ptr_mut(index) else {
        return 0;
    };
    // SAFETY: the map returned this pointer to a live, aligned u64 of this CPU, which no other CPU
    // writes; neither XDP programs nor classifiers preempt each other on a CPU.
    let counter = unsafe { &mut *counter };
    *counter += 1;
    *counter
}

/// This CPU's count of [`Verdict::index`].
#[inline(always)]
pub(crate) fn counted_index(index: u32) -> u64 {
    // SAFETY: as in `count_index`.
    COUNTERS.get_ptr(index).map_or(0, |counter| unsafe { *counter })
}

/// The namespace and interface on which a frame arrived, with the tables about them.
pub(crate) struct Ingress {
    key: PortKey,
}

impl Ingress {
    #[inline(always)]
    pub(crate) fn of(context: &XdpContext) -> Option<Self> {
        let ifindex = context.ingress_ifindex() as u32;
        match NETNS.load() {
            IN_FRONT => Some(Self { key: PortKey { netns: take_number(context)?, ifindex } }),
            netns => Some(Self { key: PortKey { netns, ifindex } }),
        }
    }

    /// The ingress of a frame in a socket buffer.
    #[inline(always)]
    pub(crate) fn of_buffer(context: &TcContext) -> Self {
        // SAFETY: the kernel gave this pointer to a live buffer; the field is one aligned u32.
        let ifindex = unsafe { (*context.skb.skb).ifindex };
        let netns = if is_behind_stubs() { take_word(context) } else { NETNS.load() };
        Self { key: PortKey { netns, ifindex } }
    }

    /// True if the port is far beyond its rate ([`bucket::is_spent`]).
    #[inline(always)]
    pub(crate) fn is_spent(&self) -> bool {
        use decide::{Bucket as _, Tables as _};
        let Some(bucket) = self.port() else {
            return true;
        };
        bucket::is_spent(bucket.load(), self.now_ns())
    }

    pub(crate) fn key(&self) -> PortKey {
        self.key
    }

    /// A value that the verifier does not know.
    #[inline(always)]
    pub(crate) fn salt(&self) -> u32 {
        self.key.ifindex
    }
}

/// Removes the number that an XDP stub has added before the frame, and returns it.
#[inline(always)]
fn take_number(context: &XdpContext) -> Option<u32> {
    let bytes: [u8; 4] = Frame::new(context).read(0)?;
    // SAFETY: the context belongs to this run; what was derived from it is not used after this.
    let rc = unsafe { bpf_xdp_adjust_head(context.ctx, NUMBER_BYTES as i32) };
    if rc == 0 { Some(u32::from_ne_bytes(bytes)) } else { None }
}

/// True for the instance that handles frames of other namespaces than the hub's.
#[inline(always)]
pub(crate) fn is_behind_stubs() -> bool {
    NETNS.load() == IN_FRONT
}

/// Reads the number that a classifier stub has written to the control block, and clears it.
#[inline(always)]
fn take_word(context: &TcContext) -> u32 {
    // SAFETY: the kernel gave this pointer to a live buffer; the word is inside it.
    let place = unsafe { &raw mut (*context.skb.skb).cb[NUMBER_WORD] };
    // SAFETY: one aligned u32, which classifiers may read and write.
    let number = unsafe { place.read_volatile() };
    // SAFETY: as above.
    unsafe { place.write_volatile(0) };
    number
}

/// As [`plain::may_be_served`]. Not inlined: inlined, the verifier takes 189,600 instructions for `port` instead of
/// 150,900 (Linux 6.18).
#[inline(never)]
fn may_be_served(last: u8) -> bool {
    plain::may_be_served(last)
}

impl ServedAddresses for Ingress {
    #[inline(always)]
    fn serves_v4(&self, address: [u8; 4]) -> bool {
        if !may_be_served(address[3]) {
            return false;
        }
        let Some(entry) = SERVED_V4.get_ptr(address) else {
            return false;
        };
        // SAFETY: the map returned this pointer to a live, aligned u32.
        let value = unsafe { entry.read_volatile() };
        value == SERVED
    }

    #[inline(always)]
    fn serves_v6(&self, address: [u8; 16]) -> bool {
        may_be_served(address[15]) && SERVED_V6.get_ptr(address).is_some()
    }

    #[inline(always)]
    fn answers_arp(&self, address: [u8; 4]) -> bool {
        may_be_served(address[3]) && SERVED_V4.get_ptr(address).is_some()
    }
}

impl decide::Tables for Ingress {
    type Bucket = Bucket;

    #[inline(always)]
    fn port(&self) -> Option<Bucket> {
        PORTS.get_ptr_mut(self.key).map(Bucket)
    }

    #[inline(always)]
    fn identity(&self, source: Mac) -> Option<Identity> {
        let found = IDENTITIES.get_ptr(IdentityKey { port: self.key, mac: source.0, reserved: [0; 2] })?;
        // SAFETY: the map returned this pointer to a live, aligned Identity. User space replaces entries
        // whole, and never reuses a slot for another guest while frames of the former may be under way.
        let identity = unsafe { found.read() };
        // The kernel gives the memory of a removed or replaced entry to another key at once, so an interrupt between the
        // look-up and the read may have made it another guest's. The slot then has another MAC.
        let [a, b, c, d, e, f] = source.0;
        let [low, high] = 1_u16.to_ne_bytes();
        if guest_word(identity.slot)? == u64::from_ne_bytes([a, b, c, d, e, f, low, high]) {
            Some(identity)
        } else {
            None
        }
    }

    #[inline(always)]
    fn now_ns(&self) -> u64 {
        // SAFETY: the helper has no arguments and no precondition.
        unsafe { bpf_ktime_get_ns() }
    }
}

impl drain::Claims for Ingress {
    #[inline(always)]
    fn key(&self) -> CookieKey {
        CookieKey(COOKIE_KEY.load())
    }

    #[inline(always)]
    fn is_claimed(&self, flow: Flow) -> bool {
        DRAINING.get_ptr(flow.number()).is_some()
    }
}

impl answer::Ledger for Ingress {
    type Entry = Entry;

    #[inline(always)]
    fn key(&self) -> CookieKey {
        CookieKey(COOKIE_KEY.load())
    }

    #[inline(always)]
    fn entry(&self, index: u32) -> Option<Entry> {
        ALL_SENT.get_ptr_mut(index).map(Entry)
    }
}

/// The sender of a frame that `port` hands to `request`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct HandedFrame {
    key: PortKey,
    pub(crate) identity: Identity,
}

/// Tail-calls `request`. Returns if there is none. A kernel that cannot tail-call from a program with functions (Linux on
/// arm64 before 6.0) loads `port` if the agent does not ask for it: the verifier then does not reach the call.
#[inline(always)]
pub(crate) fn hand_request(context: &XdpContext, ingress: &Ingress, identity: &Identity) {
    if ANSWERS_REQUESTS.load() == 0 {
        return;
    }
    note_sender(ingress, identity);
    // SAFETY: the entry is an XDP program like this one, loaded by this agent.
    unsafe { REQUEST_PROGRAM.tail_call(context, 0) };
}

/// Not inlined, to limit the stack.
#[inline(never)]
fn note_sender(ingress: &Ingress, identity: &Identity) -> u64 {
    let Some(place) = HANDED.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: the map returned this pointer to a live, aligned value of this CPU, which no other CPU writes.
    unsafe { place.write(HandedFrame { key: ingress.key, identity: *identity }) };
    1
}

impl Ingress {
    /// The ingress that `port` has found.
    #[inline(always)]
    pub(crate) fn handed(handed: &HandedFrame) -> Self {
        Self { key: handed.key }
    }
}

impl PublishedDocuments for Ingress {
    type Bytes = Body;
    type Connection = Answered;
    type Edition = SlotEdition;
    type Token = TokenOfSlot;

    #[inline(always)]
    fn request_key(&self) -> SipKey {
        SipKey(REQUEST_KEY.load())
    }

    #[inline(always)]
    fn edition(&self, slot: Slot) -> Option<SlotEdition> {
        EDITIONS.get_ptr_mut(slot).map(SlotEdition)
    }

    #[inline(always)]
    fn token(&self, slot: Slot) -> Option<TokenOfSlot> {
        TOKENS.get_ptr(slot).map(TokenOfSlot)
    }

    #[inline(always)]
    fn document(&self, slot: Slot, edition: u32, request: u64, has_token: bool) -> Option<Document> {
        if let Some(own) = published(DocumentKey { slot, edition, request }.with_token(has_token)) {
            return Some(own);
        }
        let common = published(DocumentKey::common(request).with_token(has_token))?;
        let index = common.common;
        if index >= MAX_COMMON_DOCUMENTS {
            return None;
        }
        let words: *const u64 = COMMON_USES.get_ptr(slot)?.cast();
        // SAFETY: the map returned a pointer to COMMON_WORDS words, and the index is that of one of them.
        let place = unsafe { words.add((index / COMMON_BITS) as usize) };
        // SAFETY: as above; one aligned word, which user space writes whole.
        let word = unsafe { place.read_volatile() };
        CommonUses::has(word, edition, index).then_some(common)
    }

    #[inline(always)]
    fn bytes(&self, document: &Document) -> Option<Body> {
        BODIES.get_ptr(document.body).map(|place| Body(place.cast()))
    }

    #[inline(always)]
    fn date(&self) -> Option<ServedDate> {
        served_date()
    }

    #[inline(always)]
    fn connection(&self, index: u32) -> Option<Answered> {
        ANSWERED.get_ptr_mut(index).map(Answered)
    }

    #[inline(always)]
    fn has_room(&self) -> bool {
        let used = ANSWER_RECORDS.query(BPF_RB_AVAIL_DATA as u64);
        used < RECORD_BYTES as u64 - RECORD_RESERVE
    }

    #[inline(always)]
    fn record(&self, record: AnswerRecord) {
        // `has_room` has left the room. The agent reads the ring at intervals, so nobody is woken.
        let _ = ANSWER_RECORDS.output::<AnswerRecord>(&record, BPF_RB_NO_WAKEUP as u64);
    }

    #[inline(always)]
    fn count(&self, counter: u16) {
        if let Some(place) = ANSWER_COUNTS.get_ptr_mut(counter as u32) {
            // SAFETY: as in `count_index`.
            unsafe { *place += 1 };
        }
    }
}

/// The value of `Date`.
#[inline(always)]
pub(crate) fn served_date() -> Option<ServedDate> {
    let place = DATE.get_ptr(0)?;
    // SAFETY: the map returned this pointer to a live, aligned ServedDate, of which any bytes are valid.
    Some(unsafe { place.read() })
}

/// The bytes of a long response, which are [`LONG_RESPONSE_BYTES`].
#[inline(always)]
pub(crate) fn long_body(number: u64) -> Option<*const u8> {
    LONG_BODIES.get_ptr(number).map(<*const _>::cast)
}

/// The document of this key.
#[inline(always)]
fn published(key: DocumentKey) -> Option<Document> {
    let found = DOCUMENTS.get_ptr(key)?;
    // SAFETY: the map returned this pointer to a live, aligned Document, which user space does not change. It removes
    // documents only once no program can use them.
    Some(unsafe { found.read() })
}

/// The bytes of one response. User space does not change them, and removes them only once no program can use them.
pub(crate) struct Body(*const u8);

impl Words for Body {
    #[inline(always)]
    fn word(&self, offset: usize) -> [u8; 8] {
        // SAFETY: the map returned a pointer to RESPONSE_BYTES bytes, and the caller's offset leaves eight.
        let place = unsafe { self.0.add(offset) };
        // SAFETY: as above; bytes have no alignment, and any value is valid.
        unsafe { place.cast::<[u8; 8]>().read() }
    }
}

/// An entry of `EDITIONS`. User space may write it at any time, so it is copied and never referenced.
pub(crate) struct SlotEdition(*mut Edition);

impl EditionEntry for SlotEdition {
    #[inline(always)]
    fn load(&self) -> Edition {
        // SAFETY: the map returned this pointer to a live, aligned value, of which any bytes are valid.
        unsafe { self.0.read_volatile() }
    }

    #[inline(always)]
    fn charge(&self, full_at_ns: u64) {
        // SAFETY: as in `load`; the field lies inside the value.
        let place = unsafe { &raw mut (*self.0).full_at_ns };
        // SAFETY: as in `load`; one aligned u64.
        unsafe { place.write_volatile(full_at_ns) };
    }
}

/// An entry of `TOKENS`. User space may write it at any time, so it is read word by word and never referenced.
pub(crate) struct TokenOfSlot(*const SlotToken);

impl TokenEntry for TokenOfSlot {
    #[inline(always)]
    fn until_ns(&self) -> u64 {
        // SAFETY: the map returned this pointer to a live, aligned value, and the field lies inside it.
        let place = unsafe { &raw const (*self.0).until_ns };
        // SAFETY: as above; one aligned u64, of which any value is valid.
        unsafe { place.read_volatile() }
    }

    #[inline(always)]
    fn edition(&self) -> u32 {
        // SAFETY: as in `until_ns`.
        let place = unsafe { &raw const (*self.0).edition };
        // SAFETY: as in `until_ns`; one aligned u32.
        unsafe { place.read_volatile() }
    }

    #[inline(always)]
    fn distance_from_end(&self) -> u32 {
        // SAFETY: as in `until_ns`.
        let place = unsafe { &raw const (*self.0).from_end };
        // SAFETY: as in `edition`.
        unsafe { place.read_volatile() }
    }

    #[inline(always)]
    fn word(&self, number: usize) -> u64 {
        // SAFETY: as in `until_ns`.
        let words: *const u64 = unsafe { (&raw const (*self.0).words).cast() };
        // SAFETY: the number is that of a word, so the place lies inside the value.
        let place = unsafe { words.add(number) };
        // SAFETY: as in `until_ns`.
        unsafe { place.read_volatile() }
    }
}

/// An entry of `ANSWERED`. It is copied and never referenced, as an entry of `ALL_SENT`.
pub(crate) struct Answered(*mut AnsweredConnection);

impl ConnectionEntry for Answered {
    #[inline(always)]
    fn load(&self) -> AnsweredConnection {
        // SAFETY: the map returned this pointer to a live, aligned value, of which any bytes are valid.
        unsafe { self.0.read_volatile() }
    }

    #[inline(always)]
    fn store(&self, connection: AnsweredConnection) {
        // SAFETY: as in `load`.
        unsafe { self.0.write_volatile(connection) };
    }
}

/// An entry of `ALL_SENT`. User space may write it at any time, so it is copied and never referenced. A
/// partially updated copy matches no segment, or one that the entry matched before the update.
pub(crate) struct Entry(*mut AllSent);

impl answer::Entry for Entry {
    #[inline(always)]
    fn load(&self) -> AllSent {
        // SAFETY: the map returned this pointer to a live, aligned AllSent; arrays stay as long as the program,
        // and any bytes are a valid AllSent.
        unsafe { self.0.read_volatile() }
    }

    #[inline(always)]
    fn acknowledge(&self, sent: u32) {
        // SAFETY: as in `load`; the field lies inside the AllSent.
        let place = unsafe { &raw mut (*self.0).acknowledged };
        // SAFETY: as in `load`; one aligned u32.
        unsafe { place.write_volatile(sent) };
    }

    #[inline(always)]
    fn close(&self, sent: u32) {
        // SAFETY: as in `load`; the field lies inside the AllSent.
        let place = unsafe { &raw mut (*self.0).closed };
        // SAFETY: as in `load`; one aligned u32.
        unsafe { place.write_volatile(sent) };
    }

    #[inline(always)]
    fn own(&self, posted: AllSent) {
        // SAFETY: as in `load`; the field lies inside the AllSent.
        let flow = unsafe { &raw mut (*self.0).flow };
        // SAFETY: as above.
        let held = unsafe { &raw const (*self.0).held };
        // SAFETY: as in `load`; one aligned u32.
        let held = unsafe { held.read_volatile() };
        // SAFETY: as in `load`; one aligned u64. Nothing matches the entry while it changes.
        unsafe { flow.write_volatile(0) };
        // SAFETY: as in `load`.
        unsafe { self.0.write_volatile(AllSent { flow: 0, held, ..posted }) };
        // SAFETY: as above.
        unsafe { flow.write_volatile(posted.flow) };
    }

    #[inline(always)]
    fn open(&self, mark: u16) {
        // SAFETY: as in `load`; the field lies inside the AllSent.
        let place = unsafe { &raw mut (*self.0).opened };
        // SAFETY: as in `load`; one aligned u16.
        unsafe { place.write_volatile(mark) };
    }
}

/// A port's entry in `PORTS`.
///
/// Other CPUs and user space may write it at any time, so it is copied and never referenced. A copy with
/// parts of an old and a new limit affects one frame only.
pub(crate) struct Bucket(*mut maps::Port);

impl decide::Bucket for Bucket {
    #[inline(always)]
    fn load(&self) -> maps::Port {
        // SAFETY: the map returned this pointer to a live, aligned Port; the kernel keeps the memory
        // until the program ends, and any bytes are a valid Port.
        unsafe { self.0.read_volatile() }
    }

    #[inline(always)]
    fn store(&self, full_at_ns: u64) {
        // SAFETY: as in `load`; the field lies inside the Port.
        let place = unsafe { &raw mut (*self.0).full_at_ns };
        // SAFETY: as in `load`; one aligned u64.
        unsafe { place.write_volatile(full_at_ns) };
    }

    #[inline(always)]
    fn is_guarded(&self) -> bool {
        // SAFETY: as in `load`; the field lies inside the Port.
        let place = unsafe { &raw const (*self.0).guarded };
        // SAFETY: as in `load`; one aligned u64.
        let guarded = unsafe { place.read_volatile() };
        guarded != 0
    }

    #[inline(always)]
    fn store_connections(&self, full_at_ns: u64) {
        // SAFETY: as in `store`.
        let place = unsafe { &raw mut (*self.0).connections_full_at_ns };
        // SAFETY: as in `store`.
        unsafe { place.write_volatile(full_at_ns) };
    }

    #[inline(always)]
    fn tally(&self, steered: u64) {
        // SAFETY: as in `store`.
        let place = unsafe { &raw mut (*self.0).steered };
        // SAFETY: as in `store`.
        unsafe { place.write_volatile(steered) };
    }
}

/// The guest's entry in `HOME_DEVICES`; 0 if it has none.
#[inline(always)]
fn home_entry(slot: Slot) -> u32 {
    // SAFETY: the map returned this pointer to a live, aligned u32.
    HOME_DEVICES.get_ptr(slot).map_or(0, |place| unsafe { place.read_volatile() })
}

/// True if this is still the guest's device. The kernel removes the entry of a deleted device.
#[inline(always)]
fn is_there(slot: Slot, ifindex: u32) -> bool {
    GUEST_DEVICES.get_ifindex(slot) == Some(ifindex)
}

/// The ifindex of the guest's device, if a classifier on the hub's taps reaches it.
#[inline(always)]
pub(crate) fn home_device(slot: Slot) -> Option<u32> {
    let ifindex = home_entry(slot) & !BARE;
    if ifindex != 0 && is_there(slot, ifindex) { Some(ifindex) } else { None }
}

/// True if the guest's device does not accept redirected frames, and a classifier reaches it.
#[inline(always)]
pub(crate) fn is_bare(slot: Slot) -> bool {
    let entry = home_entry(slot);
    entry & BARE != 0 && is_there(slot, entry & !BARE)
}

/// The bytes of a slot's [`Guest`].
#[inline(always)]
fn guest_word(slot: Slot) -> Option<u64> {
    let place = GUESTS.get_ptr(slot)?;
    // A single load of the whole entry prevents a partially updated copy.
    // SAFETY: the map returned this pointer to a live, aligned u64.
    Some(unsafe { place.read_volatile() })
}

/// The guests, by slot.
pub(crate) struct Guests;

impl decide::Guests for Guests {
    #[inline(always)]
    fn guest(&self, slot: Slot) -> Option<Guest> {
        let [a, b, c, d, e, f, live @ ..] = guest_word(slot)?.to_ne_bytes();
        Some(Guest { mac: [a, b, c, d, e, f], live: u16::from_ne_bytes(live) })
    }
}
