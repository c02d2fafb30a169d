//! A client of OVSDB (RFC 7047) that follows tables by conditional monitors (ovsdb-server(7), "Monitor_Cond" and
//! "Monitor_Cond_Since").
//!
//! A message has a limit, and so have the rows of a table. It answers the server's probes, and probes a server that is
//! silent. It keeps no more of a row than the columns that were asked for, and only columns
//! of one value or a map of text: the difference that a server sends of these is applied without its schema.

use metadata_content::parser;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout, timeout_at};

use super::tls::{TlsClient, TlsError};

/// Most bytes of a message. A row that is followed has less than 2 KiB.
pub const MESSAGE_BYTES: usize = 8 << 20;
/// Most rows of a table that are followed. A node has a few hundred ports.
pub const ROWS: usize = 2_048;
/// Most servers of a database.
pub const REMOTES: usize = 16;
/// How long a connection, and an answer, may take.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
/// How long a server may be silent until it is probed, and then until it answers, as in OVS.
pub const SILENT_FOR: Duration = Duration::from_secs(5);

/// Why a database cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum OvsdbError {
    /// The server cannot be reached.
    #[error("{remote}: {error}")]
    Connect {
        /// The server.
        remote: OvsdbRemote,
        /// The kernel's error.
        error: std::io::Error,
    },
    /// The connection has no TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The connection has ended.
    #[error("the connection to the database has ended: {0}")]
    Broken(String),
    /// The server refuses a request.
    #[error("the database refuses `{method}`: {reason}")]
    Refused {
        /// The method.
        method: &'static str,
        /// What the server says.
        reason: String,
    },
    /// The server has not answered in time, and the connection is as it was.
    #[error("the database has not answered `{method}` within {} s", ANSWERS_WITHIN.as_secs())]
    Late {
        /// The method.
        method: &'static str,
    },
    /// The server has lost the majority of its cluster, so what it says may be old.
    #[error("{0} has lost its cluster")]
    NoQuorum(OvsdbRemote),
    /// The server sends something else than RFC 7047 has it.
    #[error("the database sends {0}")]
    Unexpected(String),
}

impl From<std::io::Error> for OvsdbError {
    fn from(error: std::io::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

/// The address of a server (ovsdb(7), "Active").
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OvsdbRemote {
    /// `unix:PATH`
    Unix(PathBuf),
    /// `tcp:HOST:PORT`, with brackets around an IPv6 address.
    Tcp(String),
    /// `ssl:HOST:PORT`
    Ssl(String),
}

impl OvsdbRemote {
    /// The form of an address.
    pub const FORM: &str = "`unix:PATH`, `tcp:HOST:PORT` or `ssl:HOST:PORT`";

    /// Reads a list of servers, separated by commas.
    ///
    /// # Errors
    /// What was expected, and what was found.
    pub fn list(text: &str) -> Result<Vec<Self>, String> {
        let remotes: Vec<Self> = text.split(',').map(|one| one.trim().parse()).collect::<Result<_, _>>()?;
        match remotes.len() {
            1..=REMOTES => Ok(remotes),
            many => Err(format!("expected at most {REMOTES} servers, found {many}")),
        }
    }
}

impl FromStr for OvsdbRemote {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected {}, found `{text}`", Self::FORM);
        let (kind, rest) = text.split_once(':').ok_or_else(wrong)?;
        let is_address = || {
            let (host, port) = rest.rsplit_once(':')?;
            let is_host = !host.is_empty() && (host.starts_with('[') || !host.contains(':'));
            (is_host && port.parse::<u16>().is_ok()).then_some(())
        };
        match kind {
            "unix" if rest.starts_with('/') => Ok(Self::Unix(rest.into())),
            "tcp" if is_address().is_some() => Ok(Self::Tcp(rest.to_owned())),
            "ssl" if is_address().is_some() => Ok(Self::Ssl(rest.to_owned())),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for OvsdbRemote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Ssl(address) => write!(f, "ssl:{address}"),
        }
    }
}

trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for T {}

/// A connection to a server.
pub(super) struct OvsdbSession {
    stream: Box<dyn ByteStream>,
    received: Vec<u8>,
    scanner: MessageScanner,
    requests: u64,
    updates: VecDeque<MonitorUpdate>,
    is_probed: bool,
    /// Since the last message, or the probe.
    silent_since: Instant,
}

/// A change of monitored tables.
pub(super) struct MonitorUpdate {
    /// The name of the monitor.
    pub(super) monitor: String,
    /// The transaction, on servers that number them.
    transaction: Option<String>,
    /// The changes by table and row.
    tables: Value,
}

/// What a monitor begins with.
pub(super) struct MonitorStart {
    /// The changes are those since the transaction that was asked for, and not all rows.
    is_continued: bool,
    transaction: Option<String>,
    tables: Value,
}

impl OvsdbSession {
    /// Connects to a server.
    pub(super) async fn connect(remote: &OvsdbRemote, tls: Option<&TlsClient>) -> Result<Self, OvsdbError> {
        let connecting = async {
            Ok(match remote {
                OvsdbRemote::Unix(path) => Box::new(UnixStream::connect(path).await?) as Box<dyn ByteStream>,
                OvsdbRemote::Tcp(address) => Box::new(tcp(address).await?),
                OvsdbRemote::Ssl(address) => {
                    let tls = tls.ok_or_else(|| {
                        std::io::Error::other("expected `openstack.tls` in the configuration, found none")
                    })?;
                    Box::new(tls.connect(address, tcp(address).await?).await?)
                }
            })
        };
        let connected = timeout(ANSWERS_WITHIN, connecting).await;
        let stream = connected
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
            .map_err(|error| OvsdbError::Connect { remote: remote.clone(), error })?;
        let (received, updates) = (Vec::new(), VecDeque::new());
        Ok(Self {
            stream,
            received,
            scanner: MessageScanner::default(),
            requests: 0,
            updates,
            is_probed: false,
            silent_since: Instant::now(),
        })
    }

    /// Calls a method, and takes what else arrives meanwhile.
    pub(super) async fn call(&mut self, method: &'static str, params: Value) -> Result<Value, OvsdbError> {
        self.requests += 1;
        let id = json!(self.requests);
        self.send(&json!({"method": method, "params": params, "id": id})).await?;
        let answered = async {
            loop {
                let mut message = self.receive().await?;
                if message["method"].is_null() && message["id"] == id {
                    return match message["error"].take() {
                        Value::Null => Ok(message["result"].take()),
                        Value::String(reason) => Err(OvsdbError::Refused { method, reason }),
                        error => Err(OvsdbError::Refused { method, reason: error.to_string() }),
                    };
                }
                self.take(message).await?;
            }
        };
        timeout(ANSWERS_WITHIN, answered).await.unwrap_or(Err(OvsdbError::Late { method }))
    }

    /// Begins a monitor, from a transaction on if the server still knows it.
    pub(super) async fn monitor(
        &mut self,
        database: &str,
        monitor: &str,
        tables: &Value,
        since: Option<&str>,
    ) -> Result<MonitorStart, OvsdbError> {
        /// A transaction that no server has.
        const NONE: &str = "00000000-0000-0000-0000-000000000000";
        let params = json!([database, monitor, tables, since.unwrap_or(NONE)]);
        match self.call("monitor_cond_since", params).await {
            Ok(mut result) => Ok(MonitorStart {
                is_continued: result[0] == true,
                transaction: result[1].as_str().map(str::to_owned),
                tables: result[2].take(),
            }),
            // Servers before OVS 2.12.
            Err(OvsdbError::Refused { reason, .. }) if reason.contains("unknown method") => {
                let tables = self.call("monitor_cond", json!([database, monitor, tables])).await?;
                Ok(MonitorStart { is_continued: false, transaction: None, tables })
            }
            Err(error) => Err(error),
        }
    }

    /// Waits for the next change; `None` once the time is there. Probes a silent server.
    pub(super) async fn update(
        &mut self,
        until: Option<Instant>,
    ) -> Result<Option<MonitorUpdate>, OvsdbError> {
        loop {
            if let Some(update) = self.updates.pop_front() {
                return Ok(Some(update));
            }
            let silent_until = self.silent_since + SILENT_FOR;
            match timeout_at(until.map_or(silent_until, |until| until.min(silent_until)), self.receive())
                .await
            {
                Ok(message) => self.take(message?).await?,
                Err(_) if until.is_some_and(|until| until <= Instant::now()) => return Ok(None),
                Err(_) if self.is_probed => {
                    let silent = 2 * SILENT_FOR.as_secs();
                    return Err(OvsdbError::Broken(format!("no answer to a probe for {silent} s")));
                }
                Err(_) => {
                    (self.is_probed, self.silent_since) = (true, Instant::now());
                    self.send(&json!({"method": "echo", "params": [], "id": "echo"})).await?;
                }
            }
        }
    }

    /// Takes a message that is no answer to a call.
    async fn take(&mut self, mut message: Value) -> Result<(), OvsdbError> {
        let method = message["method"].as_str().unwrap_or_default().to_owned();
        let mut params = message["params"].take();
        match &*method {
            "echo" => self.send(&json!({"id": message["id"], "result": params, "error": null})).await,
            "update2" | "update3" => {
                let tables = if method == "update3" { 2 } else { 1 };
                self.updates.push_back(MonitorUpdate {
                    monitor: params[0].as_str().unwrap_or_default().to_owned(),
                    transaction: params[1].as_str().map(str::to_owned),
                    tables: params[tables].take(),
                });
                Ok(())
            }
            "monitor_canceled" => Err(OvsdbError::Broken("the server has ended the monitor".into())),
            // An answer to a probe.
            _ => Ok(()),
        }
    }

    async fn send(&mut self, message: &Value) -> Result<(), OvsdbError> {
        let bytes = message.to_string();
        let late = || std::io::Error::from(std::io::ErrorKind::TimedOut);
        Ok(timeout(ANSWERS_WITHIN, self.stream.write_all(bytes.as_bytes())).await.map_err(|_| late())??)
    }

    /// Waits for the next message. Nothing is lost if it is dropped before.
    async fn receive(&mut self) -> Result<Value, OvsdbError> {
        loop {
            if let Some(length) = self.scanner.advance(&self.received) {
                let message = parser::json(&self.received[..length]);
                self.received.drain(..length);
                self.scanner = MessageScanner::default();
                (self.is_probed, self.silent_since) = (false, Instant::now());
                return message.map_err(|error| OvsdbError::Unexpected(format!("no JSON: {error}")));
            }
            if self.received.len() > MESSAGE_BYTES {
                let long = format!("more than {MESSAGE_BYTES} bytes in a message");
                return Err(OvsdbError::Unexpected(long));
            }
            if self.stream.read_buf(&mut self.received).await? == 0 {
                return Err(OvsdbError::Broken("the server has closed it".into()));
            }
        }
    }
}

async fn tcp(address: &str) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The columns that are followed and may have several elements. Their changes are differences; an optional value changes to
/// its new value (ovsdb-server(7), "Update2").
const SETS: [&str; 2] = ["additional_chassis", "requested_additional_chassis"];

/// Finds the end of a JSON object: messages follow each other without a separator.
#[derive(Default)]
struct MessageScanner {
    at: usize,
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
}

impl MessageScanner {
    /// The length of the first message; `None` until it is whole. The same bytes must be there again, and more.
    fn advance(&mut self, bytes: &[u8]) -> Option<usize> {
        while let Some(byte) = bytes.get(self.at) {
            self.at += 1;
            match byte {
                _ if std::mem::take(&mut self.is_escaped) => {}
                b'\\' if self.is_in_string => self.is_escaped = true,
                b'"' => self.is_in_string = !self.is_in_string,
                _ if self.is_in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(self.at);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// The rows of a table that is followed, by their UUID.
#[derive(Clone, Debug, Default, PartialEq)]
struct TableRows(BTreeMap<String, Map<String, Value>>);

impl TableRows {
    /// Applies changes of this table.
    fn apply(&mut self, changes: &Value) -> Result<(), OvsdbError> {
        for (uuid, change) in changes.as_object().into_iter().flatten() {
            let Some((kind, columns)) = change.as_object().and_then(|change| change.iter().next()) else {
                return Err(OvsdbError::Unexpected("a change of a row without a kind".into()));
            };
            let columns = columns.as_object();
            match &**kind {
                "initial" | "insert" => {
                    if self.0.len() >= ROWS && !self.0.contains_key(uuid) {
                        return Err(OvsdbError::Unexpected(format!("more than {ROWS} rows of this node")));
                    }
                    self.0.insert(uuid.clone(), columns.cloned().unwrap_or_default());
                }
                "modify" => {
                    let Some(row) = self.0.get_mut(uuid) else {
                        return Err(OvsdbError::Unexpected("a change of an unknown row".into()));
                    };
                    for (column, change) in columns.into_iter().flatten() {
                        let value = row.entry(column.clone()).or_insert(Value::Null);
                        if SETS.contains(&&**column) {
                            modify_set(value, change);
                        } else {
                            modify(value, change);
                        }
                    }
                }
                "delete" => _ = self.0.remove(uuid),
                other => return Err(OvsdbError::Unexpected(format!("the change `{other}` of a row"))),
            }
        }
        Ok(())
    }
}

/// The tables of a monitor, over all connections to its database.
#[derive(Default)]
pub(super) struct MonitoredTables {
    tables: BTreeMap<String, TableRows>,
    transaction: Option<String>,
}

impl MonitoredTables {
    /// The last transaction that is known, for [`OvsdbSession::monitor`].
    pub(super) fn since(&self) -> Option<&str> {
        self.transaction.as_deref()
    }

    /// Takes what a monitor begins with.
    pub(super) fn begin(&mut self, start: MonitorStart) -> Result<(), OvsdbError> {
        if !start.is_continued {
            self.tables.clear();
        }
        self.change(&start.tables, start.transaction)
    }

    /// Takes a change.
    pub(super) fn apply(&mut self, update: MonitorUpdate) -> Result<(), OvsdbError> {
        self.change(&update.tables, update.transaction)
    }

    fn change(&mut self, tables: &Value, transaction: Option<String>) -> Result<(), OvsdbError> {
        // Differences must not be applied twice. After a change that failed in its middle the next monitor begins anew.
        self.transaction = None;
        for (table, changes) in tables.as_object().into_iter().flatten() {
            self.tables.entry(table.clone()).or_default().apply(changes)?;
        }
        self.transaction = transaction;
        Ok(())
    }

    /// Sets the rows, in place of a monitor.
    #[cfg(test)]
    pub(super) fn begin_with(&mut self, tables: &Value) {
        self.change(tables, None).expect("good changes");
    }

    /// The rows of a table.
    pub(super) fn rows(&self, table: &str) -> impl Iterator<Item = TableRow<'_>> {
        self.tables.get(table).into_iter().flat_map(|table| table.0.values().map(TableRow))
    }

    /// The UUIDs of the rows of a table.
    pub(super) fn uuids(&self, table: &str) -> Vec<&str> {
        self.tables.get(table).into_iter().flat_map(|table| table.0.keys().map(String::as_str)).collect()
    }
}

/// Applies the change of a column: of a map only the keys that differ, of others the new value. A key with the value
/// that it had is one that has gone.
fn modify(value: &mut Value, change: &Value) {
    let (Some(changes), "map") = (change[1].as_array(), change[0].as_str().unwrap_or_default()) else {
        *value = change.clone();
        return;
    };
    let mut pairs = pairs_of(value).cloned().collect::<Vec<_>>();
    for pair in changes {
        let former = pairs.iter().position(|known| known[0] == pair[0]);
        let is_gone = former.is_some_and(|at| pairs.remove(at)[1] == pair[1]);
        if !is_gone {
            pairs.push(pair.clone());
        }
    }
    *value = json!(["map", pairs]);
}

/// Applies the change of a set, which lists the elements to add and those to remove.
fn modify_set(value: &mut Value, change: &Value) {
    let mut atoms: Vec<_> = atoms_of(value).to_vec();
    for atom in atoms_of(change) {
        match atoms.iter().position(|known| known == atom) {
            Some(at) => _ = atoms.remove(at),
            None => atoms.push(atom.clone()),
        }
    }
    *value = json!(["set", atoms]);
}

/// The elements of a set of references. A set of one element may be written as that element (RFC 7047, 5.1).
fn atoms_of(value: &Value) -> &[Value] {
    match value[0].as_str() {
        Some("set") => value[1].as_array().map_or(&[], Vec::as_slice),
        Some(_) => std::slice::from_ref(value),
        None => &[],
    }
}

/// The pairs of a map.
fn pairs_of(value: &Value) -> impl Iterator<Item = &Value> {
    let pairs = value[1].as_array().filter(|_| value[0] == "map");
    pairs.into_iter().flatten()
}

/// A row.
#[derive(Clone, Copy)]
pub(super) struct TableRow<'a>(&'a Map<String, Value>);

impl<'a> TableRow<'a> {
    /// The text in a column; empty without one.
    pub(super) fn text(self, column: &str) -> &'a str {
        self.0.get(column).and_then(Value::as_str).unwrap_or_default()
    }

    /// The number in a column; `None` without one.
    pub(super) fn integer(self, column: &str) -> Option<i64> {
        self.0.get(column).and_then(Value::as_i64)
    }

    /// The text of a key in `external_ids`; `None` without one.
    pub(super) fn external_id(self, key: &str) -> Option<&'a str> {
        let pairs = self.0.get("external_ids").into_iter().flat_map(pairs_of);
        pairs.into_iter().find(|pair| pair[0] == key)?[1].as_str().filter(|text| !text.is_empty())
    }

    /// The rows that a column refers to, by their UUIDs.
    pub(super) fn references(self, column: &str) -> impl Iterator<Item = &'a str> {
        let atoms = atoms_of(self.0.get(column).unwrap_or(&Value::Null));
        atoms.iter().filter(|atom| atom[0] == "uuid").filter_map(|atom| atom[1].as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        MESSAGE_BYTES, MessageScanner, MonitoredTables, OvsdbError, OvsdbRemote, OvsdbSession, ROWS,
        SILENT_FOR, TableRows,
    };
    use serde_json::{Value, json};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{UnixListener, UnixStream};
    use tokio::time::Instant;

    #[test]
    fn remotes_have_three_kinds() {
        for good in ["unix:/run/db.sock", "tcp:10.0.0.1:6642", "tcp:[fd00::1]:6642", "ssl:sb.example:6642"] {
            assert_eq!(good.parse::<OvsdbRemote>().expect(good).to_string(), good);
        }
        for bad in ["", "unix:db.sock", "tcp:10.0.0.1", "tcp:fd00::1:6642", "ptcp:6642", "ssl::6642"] {
            let error = bad.parse::<OvsdbRemote>().expect_err(bad);
            assert!(error.contains("tcp:HOST:PORT"), "{error}");
        }
        assert_eq!(OvsdbRemote::list("tcp:a:1, ssl:b:2").expect("two").len(), 2);
        OvsdbRemote::list(&["tcp:a:1"; 17].join(",")).expect_err("too many");
    }

    #[test]
    fn messages_are_found_wherever_the_stream_is_cut() {
        let text = br#"{"a":"}\"{[","b":[1,{}]} {"id":1}"#;
        for cut in 0..text.len() {
            let mut scanner = MessageScanner::default();
            let first = scanner.advance(&text[..cut]).or_else(|| scanner.advance(text));
            assert_eq!(first, Some(24), "{cut}");
        }
    }

    #[test]
    fn a_set_changes_by_its_difference_and_an_optional_value_as_a_whole() {
        let (one, two) = (json!(["uuid", "1"]), json!(["uuid", "2"]));
        let mut tables = MonitoredTables::default();
        tables.begin_with(&json!({"t": {"row": {"insert": {}}}}));
        for (column, change, kept) in [
            ("additional_chassis", one.clone(), vec!["1"]),
            ("additional_chassis", two.clone(), vec!["1", "2"]),
            ("additional_chassis", json!(["set", [one, two]]), vec![]),
            ("chassis", two.clone(), vec!["2"]),
            ("chassis", json!(["set", []]), vec![]),
        ] {
            tables.begin_with(&json!({"t": {"row": {"modify": {column: change}}}}));
            let found: Vec<_> = tables.rows("t").flat_map(|row| row.references(column)).collect();
            assert_eq!(found, kept, "{column}");
        }
    }

    #[test]
    fn after_a_change_of_an_unknown_row_the_next_monitor_begins_anew() {
        let mut tables = MonitoredTables::default();
        let row = json!({"t": {"row": {"insert": {"name": "tap1"}}}});
        tables.change(&row, Some("t1".into())).expect("a good change");
        assert_eq!(tables.since(), Some("t1"));
        let unknown = json!({"t": {"another": {"modify": {"name": "tap2"}}}});
        let changed = tables.change(&unknown, Some("t2".into()));
        assert!(matches!(changed, Err(OvsdbError::Unexpected(_))), "{changed:?}");
        assert_eq!(tables.since(), None);
    }

    #[test]
    fn changes_of_rows_are_applied() {
        let mut table = TableRows::default();
        let ids = |pairs: Value| json!({"external_ids": ["map", pairs]});
        for (change, kept) in [
            (json!({"insert": {"name": "tap1"}}), json!({"name": "tap1"})),
            (
                json!({"modify": ids(json!([["a", "1"], ["b", "2"]]))}),
                json!({"name": "tap1", "external_ids": ["map", [["a", "1"], ["b", "2"]]]}),
            ),
            (
                json!({"modify": ids(json!([["a", "1"], ["b", "3"], ["c", "4"]]))}),
                json!({"name": "tap1", "external_ids": ["map", [["b", "3"], ["c", "4"]]]}),
            ),
            (json!({"initial": {"name": "tap2"}}), json!({"name": "tap2"})),
        ] {
            table.apply(&json!({"u1": change})).expect("a change");
            assert_eq!(json!(table.0["u1"]), kept);
        }
        table.apply(&json!({"u1": {"delete": null}})).expect("a change");
        assert_eq!(table, TableRows::default());
        for bad in [json!({"u1": {}}), json!({"u1": {"replace": {}}})] {
            table.apply(&bad).expect_err("no change");
        }
        let many: serde_json::Map<_, _> =
            (0..=ROWS).map(|n| (n.to_string(), json!({"initial": {}}))).collect();
        table.apply(&many.into()).expect_err("too many rows");
    }

    /// A session, and the server's end of it.
    async fn session() -> (OvsdbSession, UnixStream) {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("db.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        let remote = OvsdbRemote::Unix(path);
        let (session, accepted) = tokio::join!(OvsdbSession::connect(&remote, None), listener.accept());
        (session.expect("a session"), accepted.expect("a client").0)
    }

    async fn request(server: &mut UnixStream) -> Value {
        let mut bytes = vec![0; 4_096];
        let length = server.read(&mut bytes).await.expect("a request");
        serde_json::from_slice(&bytes[..length]).expect("one request")
    }

    #[tokio::test]
    async fn a_call_takes_updates_and_probes_that_come_before_its_answer() {
        let (mut session, mut server) = session().await;
        let serving = async {
            assert_eq!(request(&mut server).await["method"], "get_schema");
            let before = concat!(
                r#"{"method":"echo","id":"probe","params":["x"]}"#,
                r#"{"method":"update3","id":null,"params":["ports","t1",{"T":{}}]}"#
            );
            server.write_all(before.as_bytes()).await.expect("sent");
            assert_eq!(request(&mut server).await, json!({"id": "probe", "result": ["x"], "error": null}));
            server.write_all(br#"{"id":1,"result":{"name":"db"},"error":null}"#).await.expect("sent");
        };
        let (answer, ()) = tokio::join!(session.call("get_schema", json!(["db"])), serving);
        assert_eq!(answer.expect("an answer")["name"], "db");
        let update = session.update(None).await.expect("a connection").expect("an update");
        assert_eq!((&*update.monitor, update.transaction.as_deref()), ("ports", Some("t1")));
    }

    #[tokio::test]
    async fn an_older_server_is_asked_in_its_own_words() {
        let (mut session, mut server) = session().await;
        let serving = async {
            for answer in [
                r#"{"id":1,"result":null,"error":"unknown method"}"#,
                r#"{"id":2,"result":{"T":{"u":{"initial":{}}}},"error":null}"#,
            ] {
                let method = request(&mut server).await["method"].take();
                assert!(method.as_str().expect("a method").starts_with("monitor_cond"));
                server.write_all(answer.as_bytes()).await.expect("sent");
            }
        };
        let tables = json!({});
        let (start, ()) = tokio::join!(session.monitor("db", "m", &tables, None), serving);
        let start = start.expect("a monitor");
        assert!(!start.is_continued && start.tables["T"]["u"].is_object());
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_server_is_probed_and_then_given_up() {
        let (mut session, mut server) = session().await;
        let due = Instant::now() + SILENT_FOR / 2;
        assert!(session.update(Some(due)).await.expect("a connection").is_none() && Instant::now() == due);
        let error = session.update(None).await.err().expect("no server is silent that long");
        assert!(matches!(&error, OvsdbError::Broken(_)), "{error}");
        assert_eq!(request(&mut server).await["method"], "echo");
    }

    #[tokio::test]
    async fn a_message_without_an_end_is_given_up() {
        let (mut session, mut server) = session().await;
        let flood = tokio::spawn(async move {
            let part = vec![b'['; 1 << 20];
            for _ in 0..(MESSAGE_BYTES >> 20) + 1 {
                if server.write_all(&part).await.is_err() {
                    return;
                }
            }
        });
        let error = session.update(None).await.err().expect("too long");
        assert!(error.to_string().contains("bytes in a message"), "{error}");
        drop(session);
        flood.await.expect("no panic");
    }
}
