use super::long::{self, AnswerRest, CONTENT_AT, SUM_AT};
use super::{
    AnswerableRequest, ConnectionEntry, EditionEntry, PublishedDocuments, REQUEST_BYTES, REQUEST_MIN,
    TokenEntry, Words,
};
use super::{RESPONSE_MIN, find, hash_of, write};
use crate::answer::tests::{FROM, GUEST, ISN, KEY, LINUX, SLOT, answer_to, flow, segment, sum_of};
use crate::answer::{Ledger, PORT, sum};
use crate::cookie::CookieKey;
use crate::mac::Mac;
use crate::maps::{
    ALL_SENT_IDLE_MS, AllSent, AnswerRecord, AnsweredConnection, DATE_BYTES, Document, Edition,
    FIN_ENDS_BOTH, FIN_ENDS_BOTH_KERNEL, LONG_RESPONSE_BYTES, RESPONSE_BYTES, ServedDate, Slot, SlotToken,
    TOKEN_BYTES,
};
use crate::siphash::SipKey;
use crate::stamp::stamp;
use crate::wire::{ethernet, ipv4, protocol, tcp as header};
use core::cell::{Cell, RefCell};
use siphasher::sip::SipHasher13;
use std::string::String;
use std::vec;
use std::vec::Vec;

const GET: &[u8] = b"GET /v1/meta-data HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n";
const DATE: [u8; DATE_BYTES] = *b"Sun, 06 Nov 1994 08:49:37 GMT";
/// The offset of `Date`'s value in a response of [`Kernel::publish`].
const DATE_AT: usize = 23;
const REQUEST_KEY: SipKey = SipKey([5, 6]);
const NOW: u64 = 1_000_000_000_000;

/// What the kernel knows, with one document and one entry for every index.
struct Kernel {
    entry: Cell<AllSent>,
    answered: Cell<AnsweredConnection>,
    edition: Cell<Edition>,
    date: Cell<ServedDate>,
    token: Cell<SlotToken>,
    document: Option<(u64, Document)>,
    /// The document is for requests with a token only.
    needs_token: bool,
    bytes: Vec<u8>,
    has_room: bool,
    records: RefCell<Vec<AnswerRecord>>,
    counted: Cell<u64>,
}

impl Kernel {
    /// A kernel with this response to a request.
    fn publish(request: &[u8], response: &[u8]) -> Self {
        let mut bytes = response.to_vec();
        bytes[DATE_AT..DATE_AT + DATE_BYTES].fill(0);
        let folded = |bytes| sum::fold(sum_of(bytes));
        let document = Document {
            body: 3,
            length: bytes.len() as u16,
            content: 7,
            date: DATE_AT as u16,
            sum: folded(&bytes),
            counter: 5,
            ..Document::default()
        };
        let date = ServedDate { text: DATE, records: 0, sum: folded(&DATE), until_ns: NOW };
        bytes.resize(bytes.len().max(RESPONSE_BYTES), 0);
        Self {
            entry: Cell::default(),
            answered: Cell::default(),
            edition: Cell::new(Edition { number: 1, ..Edition::default() }),
            date: Cell::new(date),
            token: Cell::new(SlotToken { until_ns: 0, edition: 0, from_end: 0, words: [0; TOKEN_BYTES / 8] }),
            document: hash_of(request, &REQUEST_KEY).map(|hash| (hash, document)),
            needs_token: false,
            bytes,
            has_room: true,
            records: RefCell::default(),
            counted: Cell::default(),
        }
    }

    /// Answers a frame at a time; `None` if it is steered.
    fn take(&self, frame: &[u8], now_ns: u64) -> Option<Vec<u8>> {
        // Any value: `find` writes all of it.
        let mut request = AnswerableRequest::default();
        let mut kept = frame.to_vec();
        let found = find(&mut kept[..], SLOT, now_ns, &self, &mut request);
        assert_eq!(kept, frame, "the frame is as it was");
        found?;
        if request.is_long() {
            return Some(self.complete(frame, &request));
        }
        let mut answer = vec![0xaa; request.frame_length()];
        write(&mut answer[..], &request, &self).expect("the frame is long enough");
        Some(answer)
    }

    /// Begins an answer as `request` does, and completes it as `request_tcx` does.
    fn complete(&self, frame: &[u8], request: &AnswerableRequest) -> Vec<u8> {
        let mut answer = frame.to_vec();
        long::begin(&mut answer[..], request, &self).expect("each request leaves the room");
        assert_eq!(answer[..6], stamp(SLOT).0);
        let rest = AnswerRest::read(&answer[..]).expect("a begun answer");
        assert_eq!(rest.body, 3);
        answer.resize(CONTENT_AT, 0);
        answer.extend(&self.bytes[..rest.length]);
        answer[CONTENT_AT + rest.date..][..DATE_BYTES].copy_from_slice(&DATE);
        answer[SUM_AT..][..2].copy_from_slice(&rest.checksum(&self.date.get()));
        answer
    }

    fn takes(&self, frame: &[u8]) -> bool {
        self.take(frame, NOW).is_some()
    }
}

impl<'a> Ledger for &'a Kernel {
    type Entry = &'a Cell<AllSent>;

    fn key(&self) -> CookieKey {
        KEY
    }

    fn entry(&self, _: u32) -> Option<&'a Cell<AllSent>> {
        Some(&self.entry)
    }
}

impl ConnectionEntry for &Cell<AnsweredConnection> {
    fn load(&self) -> AnsweredConnection {
        self.get()
    }

    fn store(&self, connection: AnsweredConnection) {
        self.set(connection);
    }
}

impl EditionEntry for &Cell<Edition> {
    fn load(&self) -> Edition {
        self.get()
    }

    fn charge(&self, full_at_ns: u64) {
        self.set(Edition { full_at_ns, ..self.get() });
    }
}

impl TokenEntry for &Cell<SlotToken> {
    fn until_ns(&self) -> u64 {
        self.get().until_ns
    }

    fn edition(&self) -> u32 {
        self.get().edition
    }

    fn distance_from_end(&self) -> u32 {
        self.get().from_end
    }

    fn word(&self, number: usize) -> u64 {
        self.get().words[number]
    }
}

impl Words for &[u8] {
    fn word(&self, offset: usize) -> [u8; 8] {
        *self[offset..].first_chunk().expect("eight bytes")
    }
}

impl<'a> PublishedDocuments for &'a Kernel {
    type Bytes = &'a [u8];
    type Connection = &'a Cell<AnsweredConnection>;
    type Edition = &'a Cell<Edition>;
    type Token = &'a Cell<SlotToken>;

    fn request_key(&self) -> SipKey {
        REQUEST_KEY
    }

    fn edition(&self, slot: Slot) -> Option<&'a Cell<Edition>> {
        (slot == SLOT).then_some(&self.edition)
    }

    fn token(&self, slot: Slot) -> Option<&'a Cell<SlotToken>> {
        (slot == SLOT).then_some(&self.token)
    }

    fn document(&self, slot: Slot, edition: u32, request: u64, has_token: bool) -> Option<Document> {
        assert_eq!((slot, edition), (SLOT, self.edition.get().number));
        let found = self.document.filter(|(hash, _)| *hash == request && self.needs_token == has_token);
        found.map(|(_, document)| document)
    }

    fn bytes(&self, document: &Document) -> Option<&'a [u8]> {
        (document.body == 3).then_some(&self.bytes)
    }

    fn date(&self) -> Option<ServedDate> {
        Some(self.date.get())
    }

    fn connection(&self, _: u32) -> Option<&'a Cell<AnsweredConnection>> {
        Some(&self.answered)
    }

    fn has_room(&self) -> bool {
        self.has_room
    }

    fn record(&self, record: AnswerRecord) {
        self.records.borrow_mut().push(record);
    }

    fn count(&self, counter: u16) {
        assert_eq!(counter, 5);
        self.counted.set(self.counted.get() + 1);
    }
}

/// A response of this length.
fn response(length: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(length as u64);
    let mut bytes: Vec<u8> = (0..length).map(|_| rng.u8(..)).collect();
    bytes[DATE_AT..DATE_AT + DATE_BYTES].copy_from_slice(&DATE);
    bytes
}

/// The sequence and acknowledgement numbers of a connection's first segment, as its SYN-ACK gives them.
fn first() -> (u32, u32) {
    let (frame, _) = answer_to(LINUX);
    let number = u32::from_be_bytes(frame[38..42].try_into().expect("a sequence number"));
    (ISN.wrapping_add(1), number.wrapping_add(1))
}

fn asking(request: &[u8]) -> Vec<u8> {
    let (seq, ack) = first();
    segment(header::ACK | header::PSH, seq, ack, &[], request)
}

/// The request after this answer, on the same connection.
fn next(after: (u32, u32), request: &[u8], length: usize) -> Vec<u8> {
    let (seq, ack) = (after.0.wrapping_add(request.len() as u32), after.1.wrapping_add(length as u32));
    segment(header::ACK | header::PSH, seq, ack, &[], request)
}

/// Checks an answer to a request, and returns its payload.
#[track_caller]
fn payload<'a>(answer: &'a [u8], (seq, ack): (u32, u32), request: &[u8]) -> &'a [u8] {
    let (ip, tcp) = answer[14..].split_at(ipv4::HEADER);
    assert_eq!(sum::fold(sum_of(ip)), 0xffff, "the header's checksum");
    assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), answer.len() - 14);
    let pseudo = sum_of(&ip[12..]) + u32::from(protocol::TCP) + tcp.len() as u32;
    assert_eq!(sum::fold(pseudo + sum_of(tcp)), 0xffff, "the segment's checksum");
    assert_eq!(ip[16..20], GUEST);
    assert_eq!(tcp[..4], [PORT.to_be_bytes(), FROM.to_be_bytes()].concat());
    assert_eq!(tcp[4..8], ack.to_be_bytes());
    assert_eq!(tcp[8..12], seq.wrapping_add(request.len() as u32).to_be_bytes());
    &tcp[header::HEADER..]
}

#[test]
fn a_request_of_any_length_gets_a_response_of_any_length() {
    let requests = (REQUEST_MIN..=REQUEST_BYTES - header::HEADER).step_by(7);
    let lengths = (RESPONSE_MIN..=RESPONSE_BYTES).step_by(13);
    let long = (RESPONSE_BYTES + 1..=LONG_RESPONSE_BYTES).step_by(29).chain([LONG_RESPONSE_BYTES]);
    for (request, length) in requests.cycle().zip(lengths.chain(long)) {
        let mut rng = fastrand::Rng::with_seed(request as u64);
        let request: Vec<u8> = (0..request).map(|_| rng.u8(..)).collect();
        let kernel = Kernel::publish(&request, &response(length));
        let answer = kernel.take(&asking(&request), NOW);
        let answer = answer.unwrap_or_else(|| panic!("{} bytes, {length} bytes", request.len()));
        assert_eq!(payload(&answer, first(), &request), response(length));
    }
}

/// The frame of a request after `request` has begun its answer of 1,000 bytes.
fn begun() -> Vec<u8> {
    let kernel = Kernel::publish(GET, &response(1_000));
    let mut request = AnswerableRequest::default();
    let mut frame = asking(GET);
    find(&mut frame[..], SLOT, NOW, &&kernel, &mut request).expect("an answer");
    long::begin(&mut frame[..], &request, &&kernel).expect("the frame is long enough");
    frame
}

#[test]
fn no_frame_of_a_guest_is_a_begun_answer() {
    let mut frame = begun();
    assert!(AnswerRest::read(&frame[..]).is_some());
    // Every frame to the hub carries its sender's stamp.
    for source in [stamp(0), stamp(SLOT), stamp(Slot::MAX)] {
        frame[ethernet::SOURCE..][..Mac::LEN].copy_from_slice(&source.0);
        assert_eq!(AnswerRest::read(&frame[..]), None, "{source}");
    }
}

#[test]
fn a_begun_answer_that_does_not_fit_is_refused() {
    let begun = begun();
    let longest = (LONG_RESPONSE_BYTES + 40) as u16;
    for (what, at, value, is_read) in [
        ("the longest", 16, longest.to_be_bytes(), true),
        ("a longer one", 16, (longest + 1).to_be_bytes(), false),
        ("no header", 16, 39_u16.to_be_bytes(), false),
        ("a date at the end", CONTENT_AT + 8, (1_000 - DATE_BYTES as u16).to_ne_bytes(), true),
        ("a date beyond it", CONTENT_AT + 8, (1_001 - DATE_BYTES as u16).to_ne_bytes(), false),
    ] {
        let mut frame = begun.clone();
        frame[at..at + 2].copy_from_slice(&value);
        assert_eq!(AnswerRest::read(&frame[..]).is_some(), is_read, "{what}");
    }
    assert_eq!(AnswerRest::read(&begun[..CONTENT_AT + 9]), None);
}

#[test]
fn what_is_not_published_for_this_moment_is_steered() {
    type Change = fn(&mut Kernel);
    let changes: [(&str, Change); 7] = [
        ("a closed edition", |kernel| kernel.edition.set(Edition { number: 2, ..Edition::default() })),
        ("a date that has expired", |kernel| {
            kernel.date.set(ServedDate { until_ns: NOW - 1, ..kernel.date.get() });
        }),
        ("no room for a record", |kernel| {
            kernel.date.set(ServedDate { records: 1, ..kernel.date.get() });
            kernel.has_room = false;
        }),
        ("another request", |kernel| kernel.document = Some((1, kernel.document.expect("one").1))),
        ("a connection of user space", |kernel| kernel.entry.set(AllSent { held: 1, ..AllSent::default() })),
        ("a connection that user space has posted", |kernel| {
            let posted = AllSent { flow: flow().number(), finished: FIN_ENDS_BOTH, ..AllSent::default() };
            kernel.entry.set(posted);
        }),
        ("a rate that is exhausted", |kernel| {
            let edition = Edition { number: 1, full_at_ns: NOW + 5, ..Edition::default() };
            kernel.edition.set(Edition { request_ns: 1, depth_ns: 5, ..edition });
        }),
    ];
    let kernel = Kernel::publish(GET, &response(200));
    assert!(kernel.takes(&asking(GET)));
    for (what, change) in changes {
        let mut kernel = Kernel::publish(GET, &response(200));
        change(&mut kernel);
        let before = (kernel.entry.get(), kernel.edition.get());
        assert!(!kernel.takes(&asking(GET)), "{what}");
        assert_eq!(
            (kernel.entry.get(), kernel.edition.get(), kernel.counted.get()),
            (before.0, before.1, 0),
            "{what}"
        );
    }
}

#[test]
fn a_segment_that_is_no_first_request_is_steered() {
    let (seq, ack) = first();
    let flags = header::ACK | header::PSH;
    let mut wrong = asking(GET);
    wrong[60] ^= 1;
    let mut elsewhere = asking(GET);
    elsewhere[33] ^= 1;
    for (what, frame) in [
        ("a guessed acknowledgement", segment(flags, seq, ack ^ 0x0100_0000, &[], GET)),
        ("a later sequence number", segment(flags, seq.wrapping_add(1), ack, &[], GET)),
        ("a FIN", segment(flags | header::FIN, seq, ack, &[], GET)),
        ("a SYN", segment(flags | header::SYN, seq, ack, &[], GET)),
        ("a wrong checksum", wrong),
        ("another destination", elsewhere),
        ("half of it", segment(flags, seq, ack, &[], &GET[..GET.len() / 2])),
        ("more than it", segment(flags, seq, ack, &[], &[GET, GET].concat())),
    ] {
        assert!(!Kernel::publish(GET, &response(200)).takes(&frame), "{what}");
    }
}

#[test]
fn a_guest_with_small_segments_or_a_small_window_gets_a_long_answer_from_user_space() {
    for (shift, window, longest) in [
        (None, u16::MAX, 1_460),
        (None, 511, 511),
        (Some(0), 511, 511),
        (Some(3), 64, 512),
        // Linux with a receive buffer of 64 KiB, and of as much as it allows.
        (Some(7), 502, 1_460),
        (Some(10), 63, 1_460),
        (Some(14), u16::MAX, 1_460),
    ] {
        let syn = match shift {
            Some(shift) => [&[2, 4, 5, 180][..], &[header::WINDOW_SCALE, 3, shift]].concat(),
            None => vec![2, 4, 5, 180],
        };
        let frame = asking_after(&syn, window);
        for (length, is_taken) in [(longest, true), (longest + 1, false)] {
            let kernel = Kernel::publish(GET, &response(length));
            assert_eq!(kernel.takes(&frame), is_taken, "{length} bytes, {window} << {shift:?}");
        }
        let none = asking_after(&syn, 0);
        assert!(!Kernel::publish(GET, &response(100)).takes(&none), "a closed window");
    }
}

/// A request after a SYN with these options, from a guest that announces this window.
fn asking_after(options: &[u8], window: u16) -> Vec<u8> {
    let (answer, _) = answer_to(options);
    let number = u32::from_be_bytes(answer[38..42].try_into().expect("a sequence number"));
    let (seq, ack) = (ISN.wrapping_add(1), number.wrapping_add(1));
    let mut frame = segment(header::ACK | header::PSH, seq, ack, &[], GET);
    frame[48..50].copy_from_slice(&window.to_be_bytes());
    frame[50..52].fill(0);
    let length = frame.len() - 34;
    let pseudo = sum_of(&frame[26..34]) + u32::from(protocol::TCP) + length as u32;
    let checksum = sum::finish(pseudo + sum_of(&frame[34..]));
    frame[50..52].copy_from_slice(&checksum);
    frame
}

#[test]
fn a_repeated_request_gets_the_same_answer_once_counted_and_none_after_a_change() {
    let kernel = Kernel::publish(GET, &response(300));
    kernel.date.set(ServedDate { records: 1, ..kernel.date.get() });
    let answer = kernel.take(&asking(GET), NOW).expect("an answer");
    for _ in 0..3 {
        assert_eq!(kernel.take(&asking(GET), NOW), Some(answer.clone()));
    }
    assert_eq!((kernel.counted.get(), kernel.records.borrow().len()), (1, 1));
    let record = kernel.records.borrow()[0];
    assert_eq!((record.slot, record.content, record.guest), (SLOT, 7, GUEST));
    assert_eq!(u16::from_be_bytes(record.port), FROM);
    kernel.edition.set(Edition { number: 3, ..Edition::default() });
    assert!(!kernel.takes(&asking(GET)), "an answer of another edition would continue the first");
}

#[test]
fn the_next_requests_of_a_connection_are_answered_in_turn() {
    let kernel = Kernel::publish(GET, &response(100));
    let mut at = first();
    assert!(kernel.takes(&asking(GET)));
    for _ in 0..5 {
        let frame = next(at, GET, 100);
        at = (at.0.wrapping_add(GET.len() as u32), at.1.wrapping_add(100));
        let answer = kernel.take(&frame, NOW).expect("an answer");
        assert_eq!(payload(&answer, at, GET), response(100));
        assert_eq!(kernel.entry.get().finished, FIN_ENDS_BOTH_KERNEL);
    }
    assert!(!kernel.takes(&next((at.0, at.1 - 1), GET, 100)), "the guest has not received all");
    assert_eq!(kernel.counted.get(), 6);
}

#[test]
fn an_entry_is_taken_once_its_connection_is_over_or_idle_or_begun_anew() {
    let other = AllSent { flow: 9, sent: 4, finished: FIN_ENDS_BOTH_KERNEL, ..AllSent::default() };
    let idle_ns = u64::from(ALL_SENT_IDLE_MS) * 1_000_000;
    let seen = |before_ns| AnsweredConnection {
        flow: 9,
        ..AnsweredConnection::new(9, NOW - before_ns, 1, OPTIONS, 0)
    };
    let own = AllSent { flow: flow().number(), ..other };
    for (what, entry, before_ns, is_taken) in [
        ("another connection", other, 0, false),
        ("one that is over", AllSent { closed: 4, ..other }, 0, true),
        ("one that was idle too short", other, idle_ns, false),
        ("an idle one", other, idle_ns + 2_000_000, true),
        ("its own, at other numbers", own, 0, false),
        ("its own, after another SYN", AllSent { opened: flow().mark(), ..own }, 0, true),
    ] {
        let kernel = Kernel::publish(GET, &response(100));
        kernel.entry.set(entry);
        kernel.answered.set(seen(before_ns));
        assert_eq!(kernel.takes(&asking(GET)), is_taken, "{what}");
    }
}

#[test]
fn a_first_request_with_another_sequence_number_begins_a_connection_anew() {
    let (seq, _) = first();
    let other =
        AllSent { flow: flow().number(), sent: 4, finished: FIN_ENDS_BOTH_KERNEL, ..AllSent::default() };
    for (first, is_taken) in [(seq, false), (seq.wrapping_add(1), true)] {
        let kernel = Kernel::publish(GET, &response(100));
        kernel.entry.set(other);
        kernel.answered.set(AnsweredConnection::new(other.flow, NOW, 1, OPTIONS, first));
        assert_eq!(kernel.takes(&asking(GET)), is_taken, "{first}");
    }
}

const OPTIONS: crate::cookie::TcpOptions = crate::cookie::TcpOptions { segment: 1460, scale: None };

#[test]
fn a_request_takes_a_token() {
    let kernel = Kernel::publish(GET, &response(100));
    kernel.edition.set(Edition { number: 1, ..Edition::default() }.with_limit(10, 3));
    let mut at = first();
    let mut frame = asking(GET);
    let mut answered = 0;
    while kernel.takes(&frame) {
        answered += 1;
        frame = next(at, GET, 100);
        at = (at.0.wrapping_add(GET.len() as u32), at.1.wrapping_add(100));
    }
    assert_eq!(answered, 3);
}

#[test]
fn requests_have_the_hash_of_the_reference() {
    let mut random = fastrand::Rng::with_seed(1);
    for length in REQUEST_MIN..=REQUEST_BYTES - header::HEADER {
        let key = [random.u64(..), random.u64(..)];
        let request: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
        let expected = SipHasher13::new_with_keys(key[0], key[1]).hash(&request);
        assert_eq!(hash_of(&request, &SipKey(key)), Some(expected), "{length} bytes");
    }
    assert_eq!(hash_of(&[0; REQUEST_MIN - 1], &REQUEST_KEY), None);
    assert_eq!(hash_of(&[0; REQUEST_BYTES], &REQUEST_KEY), None);
}

/// A tenant may have the agent learn any path. If that path had the hash of a real one, guests that ask for the real one
/// would get its answer. An earlier hash gave pairs like these the same value under up to half of all keys.
#[test]
fn no_other_path_has_the_hash_of_a_path_that_guests_ask_for() {
    let rest = " HTTP/1.1\r\nHost: 169.254.169.254\r\nUser-Agent: Cloud-Init/24.1\r\nAccept: */*\r\n\r\n";
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..2_000 {
        let key = SipKey([random.u64(..), random.u64(..)]);
        let hash = |path: &str| hash_of(std::format!("GET {path}{rest}").as_bytes(), &key);
        let real = hash("/openstack/2018-08-27/meta_data.json");
        for at in 5..36 {
            let mut path = *b"/openstack/2018-08-27/meta_data.json";
            let flip = 1 << random.u8(0..5);
            for byte in [at, at + 4, at + 8] {
                path.iter_mut().skip(byte).take(1).for_each(|byte| *byte ^= flip);
            }
            let twin = hash(&String::from_utf8_lossy(&path));
            assert_ne!(twin, real, "{}", String::from_utf8_lossy(&path));
        }
        assert_ne!(hash("/openstack/2018-08-27/meta_$atanjso."), real);
    }
}

const TOKEN: [u8; TOKEN_BYTES] = *b"AQEAAAAAarE7vAECAwQFBgcICNh7cL9xTgVOVBvj7TiD6OBCKx0GG7SZ";

/// A request with this token, and the bytes from its start to the end.
fn with_token(token: &[u8], after: &str) -> (Vec<u8>, usize) {
    let before = b"GET /latest/meta-data/ HTTP/1.1\r\nHost: 169.254.169.254\r\nX-aws-ec2-metadata-token: ";
    let end = [token, after.as_bytes(), b"\r\n\r\n"].concat();
    ([&before[..], &end].concat(), end.len())
}

/// A kernel that knows the slot's token, and has a response for requests with it only.
fn that_needs_a_token(after: &str) -> Kernel {
    let (form, from_end) = with_token(&[0; TOKEN_BYTES], after);
    let mut kernel = Kernel::publish(&form, &response(200));
    kernel.needs_token = true;
    kernel.token.set(SlotToken {
        until_ns: NOW + 1,
        edition: 1,
        from_end: from_end as u32,
        words: core::array::from_fn(|at| {
            u64::from_ne_bytes(*TOKEN[8 * at..].first_chunk().expect("eight bytes"))
        }),
    });
    kernel
}

#[test]
fn a_request_with_the_slots_token_is_answered_wherever_the_token_stands() {
    for after in ["", "\r\nAccept-Encoding: gzip", "\r\nUser-Agent: an odd one"] {
        let kernel = that_needs_a_token(after);
        let (request, _) = with_token(&TOKEN, after);
        let answer = kernel.take(&asking(&request), NOW).expect(after);
        assert_eq!(payload(&answer, first(), &request), response(200));
    }
}

#[test]
fn a_request_without_the_slots_token_is_never_answered_from_a_document_that_needs_it() {
    let kernel = that_needs_a_token("");
    let refused = |token: &[u8]| assert!(!kernel.takes(&asking(&with_token(token, "").0)), "{token:02x?}");
    for at in 0..TOKEN_BYTES {
        let mut other = TOKEN;
        other[at] ^= 1;
        refused(&other);
    }
    refused(&[0; TOKEN_BYTES]);
    refused(b"");
    refused(&TOKEN[1..]);
    let token = kernel.token.get();
    let request = asking(&with_token(&TOKEN, "").0);
    for (what, changed) in [
        ("expired", SlotToken { until_ns: NOW, ..token }),
        ("of another edition", SlotToken { edition: 3, ..token }),
        ("elsewhere", SlotToken { from_end: token.from_end + 1, ..token }),
        ("at the end", SlotToken { from_end: 0, ..token }),
        ("before the request", SlotToken { from_end: 400, ..token }),
        ("far away", SlotToken { from_end: u32::MAX, ..token }),
    ] {
        kernel.token.set(changed);
        assert!(!kernel.takes(&request), "{what}");
    }
    kernel.token.set(token);
    assert!(kernel.takes(&request));
}

#[test]
fn a_document_that_needs_no_token_is_not_for_requests_with_one() {
    let mut kernel = that_needs_a_token("");
    kernel.needs_token = false;
    assert!(!kernel.takes(&asking(&with_token(&TOKEN, "").0)));
}
