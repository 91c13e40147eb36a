"""The held-out split: by module path, equal in all versions, without leaks."""

import tarfile

import pytest

LINES = [f"value_{n} = compute_the_value_numbered({n})" for n in range(40)]


def pick(names, wanted):
    from scripts.demo.corpus import is_held_out

    return next(name for name in names if is_held_out(name) == wanted)


@pytest.fixture
def names():
    every = [f"package_{n}/module.py" for n in range(400)]
    return pick(every, True), pick(every, False)


def write(root, name, lines):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def test_the_split_depends_on_the_module_path_alone(tmp_path, names):
    from scripts.demo.corpus import read_corpus

    held, trained = names
    for version in ("3.11", "3.12"):
        write(tmp_path, f"lib/python{version}/{held}", [f"# {version}", *LINES])
        write(tmp_path, f"lib/python{version}/{trained}", [f"x = '{version}'"] * 40)
    corpus = read_corpus(tmp_path)
    assert [item.name for item in corpus.held_out] == [held] * 2
    assert [item.name for item in corpus.train] == [trained] * 2
    assert corpus == read_corpus(tmp_path)


def test_an_archive_and_its_folder_give_the_same_corpus(tmp_path, names):
    from scripts.demo.corpus import read_corpus

    for name in names:
        write(tmp_path / "python3.13", name, [name, *LINES[: len(name)]])
    write(tmp_path / "python3.13", names[1], ["y = 'nothing in common'"] * 40)
    with tarfile.open(tmp_path / "all.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "python3.13", "python3.13")
    assert read_corpus(tmp_path / "all.tar.xz") == read_corpus(tmp_path / "python3.13")


def test_a_renamed_copy_of_a_held_out_module_is_not_trained_on(tmp_path, names):
    from scripts.demo.corpus import Document, drop_leaks

    held = Document(names[0], "\n".join(LINES))
    copy = Document("renamed.py", "\n".join(["import os", *LINES[10:30]]))
    other = Document("other.py", "\n".join(line.replace("compute", "derive") for line in LINES))
    kept, dropped = drop_leaks([copy, other], [held])
    assert kept == [other]
    assert dropped == ["renamed.py"]


def test_about_one_file_in_forty_is_held_out():
    from scripts.demo.corpus import is_held_out

    num_held_out = sum(is_held_out(f"module_{n}.py") for n in range(10_000))
    assert 200 < num_held_out < 300


@pytest.mark.parametrize(
    "path",
    [
        "site-packages/numpy/core.py",
        "encodings/cp437.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "config-3.12-x86_64-linux-gnu/python-config.py",
        "test/tokenizedata/bad_coding.py",
    ],
)
def test_installed_packages_tables_and_broken_files_are_left_out(tmp_path, names, path):
    from scripts.demo.corpus import read_corpus

    for name in names:
        write(tmp_path, name, [f"# {name} has a line of its own here {n}" for n in range(20)])
    write(tmp_path, path, LINES)
    corpus = read_corpus(tmp_path)
    assert {item.name for item in corpus.train + corpus.held_out} == set(names)


def test_help_topics_are_documents_of_their_own(tmp_path, names):
    from scripts.demo.corpus import read_corpus

    for name in names:
        write(tmp_path, name, [f"# {name} has a line of its own here {n}" for n in range(20)])
    write(tmp_path, "pydoc_data/topics.py", ["topics = {'with': 'The with statement\\n'}"])
    corpus = read_corpus(tmp_path)
    texts = {item.name: item.text for item in corpus.train + corpus.held_out}
    assert texts["pydoc_data/topics.py#with"] == "The with statement\n"


def test_a_corpus_without_held_out_files_is_refused(tmp_path, names):
    from scripts.demo.corpus import read_corpus

    write(tmp_path, names[1], LINES)
    with pytest.raises(SystemExit, match="1 training and 0 held-out"):
        read_corpus(tmp_path)
    with pytest.raises(SystemExit, match="no such folder"):
        read_corpus(tmp_path / "absent")


def test_a_written_sample_reads_back_with_its_names(tmp_path):
    from scripts.demo.corpus import Document, read_sample, write_sample

    documents = [Document(f"m{n}.py", f"# {n}\n" * 700) for n in range(5)]
    write_sample(documents, tmp_path / "sample.txt", 7_500)
    read = read_sample(tmp_path / "sample.txt")
    assert len(read) == 2
    assert set(read) <= set(documents)
    assert (tmp_path / "sample.txt").stat().st_size <= 7_500
