//! `xdp-imds register`, `ls`, `get` and `rm`.

use std::io::{self, Read as _, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};

use metadata_content::record::{Limits, Record};
use metadata_content::source::Source;
use metadata_control::instances::client::{self, Conditions};
use metadata_control::instances::{Failure, Instance, Port, is_name};
use metadata_control::status::ClientError;
use metadata_feed::directory;

use super::which::Agent;

/// How the verbs end.
pub const EXIT: &str = "\
Exit codes: 0 done; 1 refused, with what is wrong; 2 no agent to ask; 3 registered, and not
attached in time; 4 another record or change is in the way, or there is none to take out.";

/// How long to wait before an agent that is busy is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// The options of `xdp-imds register`.
#[derive(clap::Args, Debug)]
pub struct Register {
    /// The VM's record, YAML or JSON; files it names by `source` are read beside it. `-` is standard input.
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// What it is called here; by default the VM's name in the record.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// End only when all ports of the VM are attached: it may boot then.
    #[arg(long)]
    wait: bool,
    /// Longest to wait, in seconds, 60 at most.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, requires = "wait",
          value_parser = clap::value_parser!(u64).range(..=60))]
    timeout: u64,
    /// Only if nothing is registered under that name.
    #[arg(long, conflicts_with = "if_match")]
    new: bool,
    /// Only if what is registered has this tag, as `get` shows it.
    #[arg(long, value_name = "ETAG")]
    if_match: Option<String>,
    #[command(flatten)]
    asked: Asked,
}

/// The words for a [`Source`].
#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum SourceWord {
    /// The local API: by the name in its URL.
    Api,
    /// A directory of files: by the file's name.
    File,
    /// A hypervisor's hook: by the VM's UUID.
    Hook,
    /// KubeVirt: by namespace and name.
    Kubevirt,
}

impl From<SourceWord> for Source {
    fn from(word: SourceWord) -> Self {
        match word {
            SourceWord::Api => Self::Api,
            SourceWord::File => Self::File,
            SourceWord::Hook => Self::Hook,
            SourceWord::Kubevirt => Self::Kubevirt,
        }
    }
}

/// The options of `xdp-imds ls`.
#[derive(clap::Args, Debug)]
pub struct Ls {
    /// Only those of this source.
    #[arg(long, value_name = "SOURCE", value_enum)]
    source: Option<SourceWord>,
    #[command(flatten)]
    asked: Asked,
}

/// The options of `xdp-imds get`.
#[derive(clap::Args, Debug)]
pub struct Get {
    /// What it is called.
    #[arg(value_name = "NAME")]
    name: String,
    /// Where it comes from.
    #[arg(long, value_name = "SOURCE", value_enum, default_value = "api")]
    source: SourceWord,
    #[command(flatten)]
    asked: Asked,
}

/// The options of `xdp-imds rm`.
#[derive(clap::Args, Debug)]
pub struct Rm {
    /// What it is called.
    #[arg(value_name = "NAME")]
    name: String,
    /// Only if it has this tag, as `get` shows it.
    #[arg(long, value_name = "ETAG")]
    if_match: Option<String>,
    /// Well done, too, if there is none.
    #[arg(long, conflicts_with = "if_match")]
    force: bool,
    #[command(flatten)]
    asked: Asked,
}

/// What all of them take.
#[derive(clap::Args, Debug)]
struct Asked {
    #[command(flatten)]
    agent: Agent,
    /// As JSON, for programs; problems too.
    #[arg(long)]
    json: bool,
}

impl Register {
    /// Registers a VM. Returns the exit code.
    ///
    /// # Errors
    /// The record cannot be read, or `out` takes nothing.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<u8> {
        let record = read(&self.file)?;
        let name = self.name.clone().unwrap_or_else(|| record.vm.name.to_string());
        if !is_name(&name) {
            bail!("`{name}` cannot be the name of an instance: give another by --name");
        }
        let json = record.to_json().context("the record")?;
        let run = self.asked.agent.run()?;
        let until = Instant::now() + Duration::from_secs(self.timeout);
        let done = loop {
            let wait = self.wait.then(|| until.saturating_duration_since(Instant::now()));
            let matches = self.if_match.as_deref();
            let conditions = Conditions { matches, is_new: self.new, wait };
            match client::put(&run, &name, &json, &conditions) {
                // So many VMs may boot at once that not all can wait at once.
                Err(failure) if failure.status() == Some(503) && Instant::now() + PAUSE < until => {
                    std::thread::sleep(PAUSE);
                }
                done => break done,
            }
        };
        self.asked.told(out, done, |(instance, created), out| {
            let done = if *created { "registered" } else { "up to date" };
            writeln!(out, "{name}: {done}, {}", instance.state.name())?;
            ports(&instance.ports, out)
        })
    }
}

impl Ls {
    /// Lists instances. Returns the exit code.
    ///
    /// # Errors
    /// `out` takes nothing.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<u8> {
        let listed = client::list(&self.asked.agent.run()?, self.source.map(Into::into));
        self.asked.told(out, listed, |instances, out| table(instances, out))
    }
}

impl Get {
    /// Shows an instance. Returns the exit code.
    ///
    /// # Errors
    /// `out` takes nothing.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<u8> {
        let found = client::look(&self.asked.agent.run()?, self.source.into(), &self.name);
        self.asked.told(out, found, one)
    }
}

impl Rm {
    /// Takes an instance out. Returns the exit code.
    ///
    /// # Errors
    /// `out` takes nothing.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<u8> {
        let matches = self.if_match.as_deref().or((!self.force).then_some("*"));
        let conditions = Conditions { matches, ..Conditions::default() };
        let removed = client::remove(&self.asked.agent.run()?, &self.name, &conditions);
        if self.asked.json && removed.is_ok() {
            return Ok(0);
        }
        self.asked.told(out, removed, |(), out| writeln!(out, "{}: taken out", self.name))
    }
}

impl Asked {
    /// Tells how it went, and what that is as an exit code.
    fn told<T: serde::Serialize>(
        &self,
        out: &mut dyn Write,
        done: Result<T, Failure>,
        print: impl FnOnce(&T, &mut dyn Write) -> io::Result<()>,
    ) -> anyhow::Result<u8> {
        match done {
            Ok(done) if self.json => {
                serde_json::to_writer(&mut *out, &done)?;
                writeln!(out)?;
                Ok(0)
            }
            Ok(done) => print(&done, out).map(|()| 0).map_err(Into::into),
            Err(failure) => {
                match &failure {
                    Failure::Problem(problem) if self.json => {
                        serde_json::to_writer(&mut *out, problem)?;
                        writeln!(out)?;
                    }
                    failure => eprintln!("xdp-imds: {failure}"),
                }
                Ok(code(&failure))
            }
        }
    }
}

fn code(failure: &Failure) -> u8 {
    match (failure, failure.status()) {
        (Failure::Client(ClientError::NoAgent { .. } | ClientError::Forbidden { .. }), _) => 2,
        (_, Some(504)) => 3,
        (_, Some(409 | 412)) => 4,
        _ => 1,
    }
}

/// Reads a record with the files it names. The agent, which knows its policy, checks it again.
fn read(path: &Path) -> anyhow::Result<Record> {
    let limits = Limits {
        metadata_keys: Limits::METADATA_KEYS_MOST,
        metadata_chars: Limits::METADATA_CHARS_MOST,
        ..Limits::DEFAULT
    };
    if path == Path::new("-") {
        let mut text = String::new();
        let most = limits.record_octets as u64 + 1;
        io::stdin().lock().take(most).read_to_string(&mut text).context("standard input")?;
        let name = if text.trim_start().starts_with('{') { "-.json" } else { "-" };
        return Ok(Record::parse_within(&limits, name, &text)?.0);
    }
    let (dir, names) = directory::files(path)?;
    let [name] = names.as_slice() else { bail!("expected one file, found the directory {}", path.display()) };
    let missing = || anyhow!("expected a record, found no file {}", path.display());
    let loaded = directory::load(&dir, name, &limits).ok_or_else(missing)?;
    let (record, warnings) = loaded.record?;
    warnings.iter().for_each(|warning| eprintln!("xdp-imds: {warning}"));
    Ok(record)
}

fn table(instances: &[Instance], out: &mut dyn Write) -> io::Result<()> {
    let head = ["NAME", "SOURCE", "STATE", "VM", "PORTS"].map(str::to_owned);
    let rows = instances.iter().map(|instance| {
        let ports: Vec<_> = instance.ports.iter().map(|port| port.port.as_str()).collect();
        let vm = instance.vm.as_ref().map(|vm| vm.name.clone()).unwrap_or_default();
        [
            instance.name.clone(),
            instance.source.name().into(),
            instance.state.name().into(),
            vm,
            ports.join(" "),
        ]
    });
    let rows: Vec<_> = std::iter::once(head).chain(rows).collect();
    let widths: [usize; 5] =
        std::array::from_fn(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or_default());
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

fn one(instance: &Instance, out: &mut dyn Write) -> io::Result<()> {
    let row = |out: &mut dyn Write, name: &str, value: &str| writeln!(out, "{name:12}{value}");
    row(out, "name", &instance.name)?;
    row(out, "source", instance.source.name())?;
    row(out, "state", instance.state.name())?;
    for (name, value) in [
        ("shadowed by", instance.shadowed_by.as_ref().map(|by| format!("{}/{}", by.source.name(), by.name))),
        ("refused", instance.refused.clone()),
        ("vm", instance.vm.as_ref().map(|vm| format!("{}, {}", vm.name, vm.uuid))),
        ("generation", instance.generation.map(|generation| generation.to_string())),
        ("etag", instance.etag.clone()),
        ("withheld", instance.withheld.as_ref().filter(|fields| !fields.is_empty()).map(|f| f.join(", "))),
    ] {
        value.map_or(Ok(()), |value| row(out, name, &value))?;
    }
    ports(&instance.ports, out)
}

fn ports(ports: &[Port], out: &mut dyn Write) -> io::Result<()> {
    for (n, port) in ports.iter().enumerate() {
        let state = serde_json::to_value(port.state).unwrap_or_default();
        let held = port.held_by.as_ref().map(|by| format!(", held by {}/{}", by.source.name(), by.name));
        let reason = port.reason.as_ref().map(|reason| format!(", {reason}"));
        let (name, state) = (if n == 0 { "ports" } else { "" }, state.as_str().unwrap_or_default());
        let more = [held, reason].into_iter().flatten().collect::<String>();
        writeln!(out, "{name:12}{} {} {state}{more}", port.port, port.mac)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{code, one, table};
    use metadata_content::source::Source;
    use metadata_control::instances::{Failure, Instance, Name, Port, Problem, Vm};
    use metadata_control::status::{ClientError, GuestState, InstanceState};

    fn instance() -> Instance {
        Instance {
            name: "ns/web-1".into(),
            source: Source::Api,
            state: InstanceState::Contested,
            in_force: true,
            shadowed_by: None,
            refused: None,
            etag: Some("\"0a\"".into()),
            generation: Some(7),
            vm: Some(Vm { name: "web-1".into(), uuid: "7c0f".into() }),
            ports: vec![Port {
                port: "vnet0".into(),
                mac: "52:54:00:00:00:01".into(),
                state: GuestState::Unbound,
                held_by: Some(Name { source: Source::File, name: "web.yaml".into() }),
                reason: Some("no such interface yet".into()),
            }],
            record: None,
            withheld: Some(vec!["user_data".into()]),
        }
    }

    #[test]
    fn instances_are_listed_in_columns() {
        let shadowed = Instance {
            name: "web.yaml".into(),
            source: Source::File,
            state: InstanceState::Shadowed,
            ports: vec![],
            ..instance()
        };
        let mut out = Vec::new();
        table(&[instance(), shadowed], &mut out).expect("written");
        let expected = "\
NAME      SOURCE  STATE      VM     PORTS
ns/web-1  api     contested  web-1  vnet0
web.yaml  file    shadowed   web-1
";
        assert_eq!(String::from_utf8(out).expect("text"), expected);
    }

    #[test]
    fn an_instance_is_shown_with_what_is_known_of_it() {
        let mut out = Vec::new();
        one(&instance(), &mut out).expect("written");
        let expected = "\
name        ns/web-1
source      api
state       contested
vm          web-1, 7c0f
generation  7
etag        \"0a\"
withheld    user_data
ports       vnet0 52:54:00:00:00:01 unbound, held by file/web.yaml, no such interface yet
";
        assert_eq!(String::from_utf8(out).expect("text"), expected);
    }

    #[test]
    fn the_exit_code_says_what_to_do_next() {
        let problem = |status| {
            let (kind, title, detail) = Default::default();
            let (conflict, registered) = (None, None);
            Failure::Problem(Problem { kind, title, status, detail, conflict, registered }.into())
        };
        let source = std::io::ErrorKind::NotFound.into();
        let gone = Failure::Client(ClientError::NoAgent { path: "/".into(), source });
        for (failure, expected) in
            [(problem(422), 1), (gone, 2), (problem(504), 3), (problem(409), 4), (problem(412), 4)]
        {
            assert_eq!(code(&failure), expected, "{failure:?}");
        }
    }
}
