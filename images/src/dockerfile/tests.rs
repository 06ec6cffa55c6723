use super::*;

fn steps(text: &str) -> Vec<Instruction> {
    let file = read(&format!("FROM x\n{text}")).unwrap();
    file.stages[0].steps.iter().map(|step| step.instruction.clone()).collect()
}

fn one(text: &str) -> Instruction {
    let mut steps = steps(text);
    assert_eq!(steps.len(), 1, "{text}");
    steps.remove(0)
}

fn why(text: &str) -> String {
    read(&format!("FROM x\n{text}")).unwrap_err().to_string()
}

#[test]
fn lines_go_on_and_comments_do_not_matter() {
    let text = "# escape=\\\n\nARG A=1\nfrom a AS B\n# no\n  run one \\\n# not this\n\n   two \\  \n\
                three\nRUN four\\\\\nCMD x\r\n";
    let file = read(text).unwrap();
    assert_eq!(file.globals.len(), 1);
    let stage = &file.stages[0];
    assert_eq!((stage.image.as_str(), stage.name.as_deref(), stage.line), ("a", Some("b"), 4));
    let texts: Vec<_> = stage.steps.iter().map(|step| (step.line, step.text.as_str())).collect();
    assert_eq!(texts, [(6, "run one    two three"), (11, "RUN four\\\\"), (12, "CMD x")]);
}

#[test]
fn another_escape_leaves_backslashes() {
    let file =
        read("# syntax=docker/dockerfile:1\n# escape=`\nFROM a\nRUN a `\nb\\\nENV x=y").unwrap();
    assert_eq!(file.escape, '`');
    assert_eq!(file.stages[0].steps.len(), 2);
    assert!(read("# escape=x\nFROM a").is_err());
    // Behind anything else it is a comment.
    assert_eq!(read("FROM a\n# escape=`\n").unwrap().escape, '\\');
}

#[test]
fn documents_follow_their_line() {
    let text = "RUN <<A cat - <<-\"B\"\none\n\\\nA\n\t\ttwo $x\n\tB\nUSER u";
    let [Instruction::Run { program, heredocs, .. }, Instruction::User(_)] = &steps(text)[..]
    else {
        panic!("{:?}", steps(text));
    };
    assert_eq!(program, &Program::Line("<<A cat - <<-\"B\"".to_owned()));
    let found: Vec<_> =
        heredocs.iter().map(|doc| (&*doc.name, &*doc.content, doc.expands)).collect();
    assert_eq!(found, [("A", "one\n\\\n", true), ("B", "two $x\n", false)]);
    let Instruction::Copy(copy) = one("COPY <<one <<two /d/\n1\none\n2\ntwo") else { panic!() };
    assert_eq!((copy.sources.len(), copy.heredocs.len(), copy.to.as_str()), (0, 2, "/d/"));
    assert!(why("RUN <<EOF\nnever").contains("does not end"));
    // Shifts and strings of bash are no documents.
    assert_eq!(steps("RUN cat <<<x\nRUN echo $((1<<2))").len(), 2);
}

#[test]
fn options_and_forms_are_read() {
    let Instruction::Copy(copy) =
        one("COPY --from=0 --chown=a:b --chmod=755 --link [\"a b\", \"c\", \"/d e/\"]")
    else {
        panic!()
    };
    assert_eq!(copy.sources, ["a b", "c"]);
    assert_eq!(copy.to, "/d e/");
    let seen = (copy.from.as_deref(), copy.owner.as_deref(), copy.mode.as_deref());
    assert_eq!(seen, (Some("0"), Some("a:b"), Some("755")));
    assert_eq!(
        one("CMD [\"a\", \"b\"]"),
        Instruction::Cmd(Program::Words(vec!["a".into(), "b".into()]))
    );
    assert_eq!(one("CMD ['a']"), Instruction::Cmd(Program::Line("['a']".into())));
    assert_eq!(
        one("ENV a=\"x y\" b=c"),
        Instruction::Env(vec![("a".into(), "\"x y\"".into()), ("b".into(), "c".into())])
    );
    assert_eq!(one("ENV a x  y"), Instruction::Env(vec![("a".into(), "x  y".into())]));
    assert_eq!(
        one("ARG a b=1"),
        Instruction::Arg(vec![("a".into(), None), ("b".into(), Some("1".into()))])
    );
    let Instruction::Healthcheck(Some(check)) =
        one("HEALTHCHECK --interval=5s --retries=2 CMD a b")
    else {
        panic!()
    };
    assert_eq!(check.program, Program::Line("a b".into()));
    assert_eq!(check.options["interval"], "5s");
    assert_eq!(one("HEALTHCHECK NONE"), Instruction::Healthcheck(None));
    let Instruction::Run { mounts, network, .. } =
        one("RUN --network=none --mount=type=secret,id=k,dst=/k --mount=target=/c,src=a,rw true")
    else {
        panic!()
    };
    assert_eq!(network.as_deref(), Some("none"));
    assert_eq!((mounts[0].kind, mounts[0].options["target"].as_str()), (MountKind::Secret, "/k"));
    assert_eq!(
        (mounts[1].kind, mounts[1].options["readonly"].as_str()),
        (MountKind::Bind, "false")
    );
}

#[test]
fn what_is_not_done_is_refused_by_its_name() {
    for (text, said) in [
        ("ADD https://example.org/x /x", "https://example.org/x"),
        ("ADD git@example.org:x /x", "git@"),
        ("COPY --parents a /b", "--parents"),
        ("COPY --exclude=*.x a /b", "--exclude"),
        ("COPY a", "COPY wants"),
        ("RUN --mount=type=ssh true", "type=ssh"),
        ("RUN --mount=type=cache true", "target"),
        ("RUN --mount=type=odd,target=/x true", "odd"),
        ("RUN --mount=type=tmpfs,target=/x,odd=1 true", "odd"),
        ("RUN --network=host true", "--network=host"),
        ("RUN --security=insecure true", "--security"),
        ("RUN --odd true", "--odd"),
        ("RUN", "RUN wants"),
        ("SHELL sh -c", "SHELL wants"),
        ("ENV a", "no value"),
        ("ENV a=1 b", "NAME=VALUE"),
        ("ONBUILD ONBUILD RUN x", "ONBUILD"),
        ("ONBUILD FROM x", "FROM"),
        ("ONBUILD ODD x", "ODD"),
        ("USER --odd u", "--odd"),
        ("ODD x", "ODD"),
        ("FROM a b", "FROM wants"),
        ("FROM a AS 1", "stage"),
        ("HEALTHCHECK ODD", "ODD"),
    ] {
        let why = why(text);
        assert!(why.contains(said) && why.contains("line 2"), "{text}: {why}");
    }
    assert!(read("").unwrap_err().to_string().contains("FROM"));
    assert!(read("RUN x\nFROM a").unwrap_err().to_string().contains("before the first FROM"));
}

#[test]
fn a_file_is_bounded() {
    let long = format!("FROM a\nRUN {}", "x".repeat(BYTES_MAX as usize));
    assert!(read(&long).is_err());
    let many = "FROM a\n".to_owned() + &"USER u\n".repeat(STEPS_MAX);
    assert!(read(&many).unwrap_err().to_string().contains("instructions"));
}

#[test]
fn one_instruction_is_read_alone() {
    assert_eq!(instruction("ENV a=b").unwrap().instruction, one("ENV a=b"));
    assert!(instruction("ENV a=b\nUSER x").is_err());
    assert!(instruction("FROM x").is_err());
    assert!(instruction("").is_err());
}
