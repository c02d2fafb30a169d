//! Lays out one case: records for the agent, the same documents for the peers, and the plan for the guests.
//!
//! Every document comes from the agent's own renderer, so that all subjects serve the same bytes.

use super::crawl::{Asked, Dialect};
use super::guest::{Body, Expected, Plan, Planned, tap_name};
use super::peer::{OWN_MAC, Page, Tenant};
use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use metadata_common::addresses;
use metadata_common::addresses::Connection;
use metadata_common::time::Now;
use metadata_content::dialect::render;
use metadata_content::http::target::normalise;
use metadata_content::http::{Headers, Method, Request, Response};
use metadata_content::record::{Record, RecordLimits, USER_DATA_DEFAULT, USER_DATA_MAX};
use metadata_content::store::{Interner, LiveOutcome, Responses, VmState};
use metadata_feed::directory;
use serde_json::json;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::guest::METADATA;
use support::record::{Identity, replace};
use tempfile::TempDir;

/// Bytes of all user-data of a case together. Beyond it, guests share texts.
const USER_DATA_IN_ALL: usize = 256 << 20;
/// Requests per second that a record allows its guest. It is high, because guests boot again and again.
const REQUESTS_PER_SECOND: u32 = 1_000_000;
/// The directory for files, so that reading them needs no disk.
const IN_MEMORY: &str = "/dev/shm";
/// The token that peers answer with. It is as long as the agent's.
const PEERS_TOKEN: &str = "AQAEAI4xVrg5xVnSdFYNZCbLpYWKSEwDqLtSLUFb9SDYmbrTYl1zXg==";

/// A case, with its files on a file system in memory.
pub(crate) struct Case {
    pub(crate) dialect: Dialect,
    /// The guests. The last one floods, if any does.
    pub(crate) tenants: Vec<Tenant>,
    /// Bytes of a guest's user-data.
    pub(crate) user_data: usize,
    pub(crate) requests: usize,
    directory: TempDir,
}

impl Case {
    /// Lays out a case with `guests` guests.
    pub(crate) fn lay_out(dialect: Dialect, guests: usize, user_data: usize) -> Result<Self> {
        ensure!(
            user_data <= USER_DATA_MAX as usize,
            "user-data can have at most {USER_DATA_MAX} bytes, not {user_data}"
        );
        let base =
            if Path::new(IN_MEMORY).is_dir() { PathBuf::from(IN_MEMORY) } else { std::env::temp_dir() };
        let directory = tempfile::Builder::new().prefix("xdp-imds-storm-").tempdir_in(base)?;
        let mut case = Self { dialect, tenants: Vec::new(), user_data, requests: 0, directory };
        std::fs::create_dir(case.records())?;
        case.write(guests)?;
        Ok(case)
    }

    /// Returns the directory of records.
    pub(crate) fn records(&self) -> PathBuf {
        self.directory.path().join("records")
    }

    /// Returns the file of the generator's plan.
    pub(crate) fn plan(&self) -> PathBuf {
        self.directory.path().join("plan.json")
    }

    fn write(&mut self, guests: usize) -> Result<()> {
        let crawl = self.dialect.crawl()?;
        self.requests = crawl.len();
        let mut bodies = Bodies::create(self.directory.path().join("bodies"))?;
        let mut planned = Vec::with_capacity(guests);
        let mut interner = Interner::new();
        for number in 0..guests {
            let identity = Identity::of(u16::try_from(number)?);
            let record = self.record(&identity, guests)?;
            let vm = VmState::alone(record.vm.uuid.as_str());
            let responses = render(&record, &mut interner, vm);
            let (pages, answers) = ask(&crawl, &identity, &responses, &mut bodies)?;
            self.tenants.push(Tenant {
                tap: tap_name(number),
                mac: identity.mac,
                address: identity.address,
                pages,
            });
            planned.push(Planned { mac: identity.mac.0, address: identity.address, answers });
        }
        let requests = crawl.iter().map(Asked::text).collect();
        let plan = Plan { server: METADATA, requests, bodies: bodies.finish()?, guests: planned };
        let mut file = BufWriter::new(File::create(self.plan())?);
        serde_json::to_writer(&mut file, &plan)?;
        Ok(file.flush()?)
    }

    /// Writes a guest's record and loads it as the agent will.
    fn record(&self, identity: &Identity, guests: usize) -> Result<Record> {
        // As many distinct texts as fit into memory. Guests whose numbers are equal modulo `texts` share one.
        let texts = (USER_DATA_IN_ALL / self.user_data.max(1)).clamp(1, guests) as u16;
        let like = Identity::of(identity.number % texts).with_user_data_of(self.user_data);
        let mut record: serde_json::Value = serde_json::from_str(&identity.record(1))?;
        record["user_data"] = json!({"text": like.user_data});
        record["vendor_data"] = json!({"text": "#cloud-config\n{}\n"});
        record["metadata"] = json!({"role": "web"});
        record["admin"] = json!({"user": "alice"});
        let most = u32::try_from(self.user_data)?.max(USER_DATA_DEFAULT);
        record["serve"] = json!({"smbios": self.dialect.smbios(), "limits": {
            "rps": REQUESTS_PER_SECOND, "burst": REQUESTS_PER_SECOND, "user_data": most,
        }});
        replace(&identity.path(&self.records()), &record.to_string())?;
        let name = format!("{}.yaml", identity.hostname);
        let loaded = directory::load(&self.records(), &name, &RecordLimits::DEFAULT)
            .with_context(|| format!("{name} has no record"))?;
        Ok(loaded.record?.0)
    }
}

/// Returns the expected answers to a guest's requests, in order, and the pages that a peer needs for them.
pub(crate) fn ask(
    crawl: &[Asked],
    identity: &Identity,
    responses: &Responses,
    bodies: &mut Bodies,
) -> Result<(Vec<Page>, Vec<Expected>)> {
    let (mut pages, mut answers, mut token) = (Vec::<Page>::new(), Vec::new(), String::new());
    for asked in crawl {
        if asked.is_signed() {
            answers.push(Expected { status: 200, body: Body::Token });
            continue;
        }
        let response = answer(asked, identity, responses, &token)?;
        let mut body = response.body().to_bytes();
        let status = response.status().0;
        if asked.brings_token() {
            token = String::from_utf8(body.to_vec())?;
            answers.push(Expected { status, body: Body::Token });
            body = Bytes::from_static(PEERS_TOKEN.as_bytes());
        } else {
            let (offset, length) = (bodies.add(&body)?, body.len() as u64);
            answers.push(Expected { status, body: Body::Exactly { offset, length } });
        }
        // Guests request some documents twice.
        if !pages.iter().any(|page| page.method == asked.method && page.path == asked.path) {
            let content_type = response.field("Content-Type").unwrap_or_default().to_owned();
            let (method, path) = (asked.method.clone(), asked.path.clone());
            pages.push(Page { method, path, status, content_type, body });
        }
    }
    Ok((pages, answers))
}

/// Returns the agent's answer to a request.
fn answer(asked: &Asked, identity: &Identity, responses: &Responses, token: &str) -> Result<Response> {
    let method = Method::from_token(&asked.method);
    let path = asked.path.replace(OWN_MAC, &identity.mac.to_string());
    let field = asked.field_with(token);
    let fields: Vec<_> =
        field.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
    let target = normalise(&path).ok().with_context(|| format!("{path} is not a valid path"))?;
    let request = Request { method, target: target.target(), headers: Headers::new(&fields), body: b"" };
    let connection = Connection {
        slot: 0,
        local: (addresses::METADATA.into(), 80),
        remote: (identity.address.into(), 40_000),
    };
    let now = Now { mono: Duration::ZERO, unix_seconds: 0 };
    let outcome = responses.answer(now, &connection, &request, None);
    let (LiveOutcome::Ready(response) | LiveOutcome::Changed(response)) = outcome else {
        anyhow::bail!("{path} has no immediate answer");
    };
    ensure!(
        matches!(response.status().0, 200 | 204),
        "{} {path} gets status {}; the crawl does not match the record",
        asked.method,
        response.status().0
    );
    Ok(response)
}

/// The file of bodies, which has each distinct body once.
pub(crate) struct Bodies {
    path: PathBuf,
    file: BufWriter<File>,
    length: u64,
    known: HashMap<Bytes, u64>,
}

impl Bodies {
    pub(crate) fn create(path: PathBuf) -> Result<Self> {
        let file =
            BufWriter::new(File::create(&path).with_context(|| format!("cannot make {}", path.display()))?);
        Ok(Self { path, file, length: 0, known: HashMap::new() })
    }

    /// Adds a body if it is new; returns its offset in the file.
    fn add(&mut self, body: &Bytes) -> Result<u64> {
        if let Some(&offset) = self.known.get(body) {
            return Ok(offset);
        }
        let offset = self.length;
        self.file.write_all(body)?;
        self.length += body.len() as u64;
        self.known.insert(body.clone(), offset);
        Ok(offset)
    }

    pub(crate) fn finish(mut self) -> Result<PathBuf> {
        self.file.flush()?;
        Ok(self.path)
    }
}
