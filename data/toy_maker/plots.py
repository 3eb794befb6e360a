"""The plots: what a story of a kind is asked for with, and its beats.

A beat is one of several sentences written here, and `~`, and the first words of a sentence that the teacher goes on
with. In braces: N the hero's name, who the hero with its trait, F and friend the other one, he him his (He His) the
hero's pronouns, and what the plot is about (thing, food …). What stands here keeps a story on its road; what the
teacher adds makes each one different. A sentence of the teacher's that is no good is left out, and the road still
leads to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from toy_maker.frame import ENDINGS, LAST, MORALS, OPENINGS


@dataclass(frozen=True)
class Plot:
    asks: tuple[str, ...]  # go behind "a story about a shy fox"
    topics: tuple[str, ...]  # or the whole subject
    beats: tuple[tuple[str, ...], ...]


def _plot(asks: str, topics: str, moral: str, *beats: str) -> Plot:
    """Beats as text: variants on a line each; the opening, the moral and the ending are added."""
    morals = MORALS[moral].split("|")
    lessons = tuple(f"{{N}} learned that {one}." for one in morals) + tuple(
        f"Now {{N}} knew that {one}." for one in morals
    )
    middle = tuple(tuple(line.strip() for line in beat.strip().splitlines()) for beat in beats)
    return Plot(tuple(asks.split("|")), tuple(topics.split("|")), (OPENINGS, *middle, (*lessons, ""), ENDINGS, LAST))


PLOTS = {
    "find": _plot(
        "who finds {a_thing}|who found {a_thing}|and {a_thing}",
        "{a_thing}|finding {a_thing}|a lost {thing0}|helping others",
        "help",
        """One day, {N} found {a_thing} {spot}. ~It was
        One sunny morning, {N} went for a walk and saw {a_thing} {spot}. ~"What a
        One day, something {spot} caught {N}'s eye. It was {a_thing}! ~{N} picked it up and""",
        """"Whose {thing} is this?" asked {N}. ~{He} looked
        {N} wanted to keep the {thing}. But then {he} thought, "Someone must miss it." ~So {N}
        "I must find out who lost it," said {N}. ~{He} asked""",
        """Then {N} met {F} the {friend}. {F} was crying. "I lost my {thing}," said {F}. ~{N} felt
        Near the {road}, {F} the {friend} was looking for something. "Have you seen my {thing}?" asked {F}. ~{N} felt
        At last {N} came to the house of {F} the {friend}. ~{F} looked very""",
        """"Here it is!" said {N}, and gave the {thing} back to {F}. ~{F} was so happy that
        {N} held out the {thing}. "Is this yours?" {F} jumped for joy. ~"Yes! Thank you""",
    ),
    "lose": _plot(
        "who loses {his} {thing}|who lost {his} {thing}|who cannot find {his} {thing}",
        "losing something|a lost {thing0}|{a_thing}|looking for something",
        "help",
        """{N} had {a_thing}. {He} took it everywhere. ~{He} loved it because
        {N}'s favorite thing was {a_thing}. ~Every night, {he}""",
        """But one day, the {thing} was gone! ~{N} looked
        One morning, {N} woke up and could not find the {thing}. ~{He} was so
        One windy day, {N} lost the {thing}. ~"Oh no!\"""",
        """{F} the {friend} came by. "Why are you sad?" asked {F}. "I lost my {thing}," said {N}. ~"Don't worry
        {N} asked {F} the {friend} for help. ~They looked
        "I will help you," said {F} the {friend}. ~Together they went""",
        """Then {F} saw something {spot}. It was the {thing}! ~{N} was
        At last they found the {thing} {spot}. ~{N} held it
        "Look!" cried {F}. The {thing} was lying {spot}. ~"I am so""",
    ),
    "storm": _plot(
        "and a storm|in a storm|who is caught in a storm|and a rainy day",
        "two friends and a storm|a storm|the rain|a big storm|bad weather",
        "help",
        """One day, {N} and {F} the {friend} were playing outside. ~They
        One afternoon, {N} went to visit {F} the {friend}. ~On the way,""",
        """Suddenly the sky turned dark. The wind began to blow. ~{N} felt
        Then it began to rain, and there was a loud boom of thunder. ~"We must
        A big storm was coming. The trees were shaking. ~{N} and {F}""",
        """"Come with me!" said {F}. They ran to {shelter}. ~Inside, it was
        {N} saw {shelter}. "Quick, in there!" ~They sat
        They held on to each other and ran until they found {shelter}. ~There they""",
        """They waited and waited. At last the rain stopped. ~The sun
        After a while the storm was over. There was a rainbow in the sky! ~"Look at""",
    ),
    "afraid": _plot(
        "who is afraid of {fear}|who was afraid of {fear}|who is not afraid any more",
        "being brave|being afraid|courage|{fear}|a brave friend",
        "brave",
        """{N} was afraid of {fear}. ~When
        There was one thing that {N} did not like: {fear}. ~It made""",
        """One day, {F} the {friend} said, "Let us go out and play." But {N} shook {his} head. ~"I am
        One evening, {N} told {F} the {friend} about it. ~{F} listened and
        {F} the {friend} found {N} hiding {spot}. ~"Why are""",
        """"I was afraid of {fear} too," said {F}. "Take my hand." ~{N} took
        {F} had an idea. "We will go together, one small step at a time." ~So they""",
        """{N} took a deep breath. {He} counted to three. ~Then {he}
        At first {N} was shaking. But then {he} saw that nothing bad happened. ~{He} began""",
        """"I did it!" said {N}. "I am not afraid of {fear} any more!" ~{F}
        {N} laughed out loud. ~{He} was not""",
    ),
    "lonely": _plot(
        "who wants a friend|who is looking for a friend|who has no friends|who makes a new friend|and a {friend}",
        "friendship|making friends|a new friend|two friends|being lonely|friends",
        "hello",
        """{N} had no friends to play with. ~{He} felt
        But {N} was lonely. ~{He} wished
        {N} wanted to have a friend. ~So one day {he}""",
        """One day, {N} saw {F} the {friend} {spot}. ~{F} was
        Then a new neighbor came. It was {F} the {friend}. ~{N} wanted to""",
        """"Hello," said {N} in a small voice. "Do you want to play with me?" ~{F}
        {N} was too shy to speak. But {F} smiled and said, "Hello! What is your name?" ~{N} said
        "May I sit here?" asked {N}. "Yes, please," said {F}. ~They talked about""",
        """They played all afternoon. ~They ran
        {F} shared some {food} with {N}. ~They
        They played hide and seek, and they laughed a lot. ~Then""",
    ),
    "share": _plot(
        "who does not want to share|who learns to share|and a basket of {food}|who shares {his} {food}|"
        "who loves {food}",
        "sharing|{food}|a picnic|learning to share|being kind",
        "share",
        """One day, {N} had a big basket of {food}. ~They smelled
        {N} loved {food} more than anything. One day, {he} found a lot of {food}. ~{He} was so
        {N}'s grandmother gave {him} a bag of {food}. ~{N}""",
        """{F} the {friend} came by. "I am so hungry," said {F}. "May I have some?" ~{N} thought
        "Those {food} look good," said {F} the {friend}. But {N} said, "No, they are all mine!" ~{F} was
        Soon {F} the {friend} saw the {food}. {F} had nothing to eat. ~{N} did not""",
        """{N} began to eat alone. But it was not fun at all. ~{He} saw
        Then {N} saw how sad {F} was. {His} heart felt heavy. ~{He} knew""",
        """"I am sorry," said {N}. "Let us share the {food}." ~{F}
        {N} gave half of the {food} to {F}. ~They sat
        "Come and eat with me," said {N}. ~Together they""",
    ),
    "help": _plot(
        "who helps a {friend}|who helps a friend|who likes to help|who saves a {friend}",
        "helping a friend|a {friend} in trouble|kindness|helping|being kind",
        "help",
        """One day, {N} heard a cry for help. ~It came from
        One morning, {N} was walking near the river. "Help! Help!" someone called. ~{N} ran
        One cold day, {N} went out to look for {food}. Then {he} heard a sad voice. ~{He}""",
        """It was {F} the {friend}. {F} was stuck {trap}. ~"Please
        There was {F} the {friend}, stuck {trap}. ~{N} wanted
        {F} the {friend} was {trap}, and could not get out. ~{F} looked""",
        """"Do not worry, I will help you," said {N}. {He} pulled and pulled. ~But
        {N} thought hard. Then {he} had an idea. {He} got a long rope. ~{He} tied
        {N} was small, but {he} did not give up. ~{He} pushed""",
        """Pop! {F} was free. ~"Thank you
        At last {F} was safe. ~{F} said
        With one big pull, {F} came out. They both fell over and laughed. ~Then""",
    ),
    "truth": _plot(
        "who breaks a {vase}|who tells a lie|who tells the truth|who made a mistake",
        "telling the truth|a broken {vase}|being honest|saying sorry|a mistake",
        "true",
        """One day, {N} was playing inside with a ball. ~{He} threw
        One afternoon, {N} visited {F} the {friend}. They ran around the table. ~It was""",
        """Crash! The {vase} fell down and broke. ~{N} was
        Oh no! {N} hit the {vase}, and it broke into many pieces. ~{He} felt""",
        """{F} the {friend} came in. "Who broke my {vase}?" asked {F}. ~{N} wanted
        {N} hid the pieces under the bed. But {he} could not stop thinking about it. ~{He}""",
        """"I did it," {N} said in a small voice. "I am very sorry." ~{F}
        {N} began to cry. "It was me. I broke it." ~{F} looked""",
        """"Thank you for telling me the truth," said {F}. ~"We can
        {F} was not angry at all. They fixed the {vase} with glue. ~Now""",
    ),
    "learn": _plot(
        "who wants to {skill}|who learns to {skill}|who cannot {skill}|who dreams that {he} can {skill}",
        "learning something new|never giving up|practice|a dream",
        "try",
        """{N} wanted to learn how to {skill}. ~{He} dreamed
        One day, {N} saw {F} the {friend}. {F} could {skill} so well! ~"I want""",
        """{N} tried to {skill}. But it did not work. ~{He}
        The first time, everything went wrong. ~{N}""",
        """"Can you teach me to {skill}?" {N} asked {F} the {friend}. ~{F} said
        {F} the {friend} saw this. "I can show you how," said {F}. ~They""",
        """{N} practiced every day. ~Some days
        {N} tried again and again. Slowly it got better. ~{F}""",
        """At last, one bright morning, {N} could {skill}! ~Everyone
        Then it worked! "Look, I can {skill}!" cried {N}. ~{F}""",
    ),
    "map": _plot(
        "who finds an old map|who looks for a treasure|and a treasure|who goes on an adventure|who goes on a long trip",
        "a treasure|an adventure|an old map|a secret|a treasure hunt",
        "friend",
        """One day, {N} found an old map {spot}. ~It showed
        {N}'s grandfather gave {him} an old map. "It leads to a treasure," he said. ~{N} was""",
        """{N} asked {F} the {friend} to come along. ~They packed
        "Let us go together," said {F} the {friend}. ~So they walked""",
        """The way was long. They crossed a river and climbed a hill. ~Then
        They came to a dark cave. ~Inside,
        Soon they lost their way. But {F} looked at the map again. ~"We have to""",
        """There was a big chest! They opened it slowly. Inside was {a_thing}. ~It
        Under a big stone they found {a_thing}. ~"This is
        At the end of the map there was no gold, but the most beautiful view they had ever seen. ~They""",
    ),
    "gift": _plot(
        "who makes a present for a friend|who makes {gift}|and a birthday|who forgets a birthday|who goes to a party",
        "a birthday|a present|a birthday party|a surprise|a gift for a friend",
        "friend",
        """It was almost the birthday of {F} the {friend}. {N} wanted to give {F} something nice. ~But
        Tomorrow was {F}'s birthday. {F} was a {friend} and {N}'s best friend. ~{N} thought""",
        """{N} had no money. "I will make {gift}," {he} said. ~{He} worked
        "I know!" said {N}. "I will make {gift}." ~First {he} got""",
        """It was hard work, and {N} made a big mess. ~But
        In the evening, the present was ready. ~{N} looked""",
        """The next day, {N} went to the party. "Happy birthday, {F}!" ~{F} opened
        {N} gave the present to {F}. ~{F} opened it and""",
        """"This is the best present of all," said {F}, "because you made it." ~They
        Then they all ate cake and danced. ~It was""",
    ),
    "lostway": _plot(
        "who gets lost|who gets lost in the woods|who cannot find the way home|who runs away from home|"
        "who wants to go home",
        "getting lost|coming home|the way home|a long walk",
        "home",
        """One day, {N} followed a pretty butterfly into the woods. ~It flew
        {N}'s mother said, "Do not go too far." But {N} did not listen. ~{He}
        One day, {N} wanted to see the world. {He} walked and walked. ~{He} saw""",
        """Soon {N} did not know where {he} was. ~Everything looked
        It was getting dark, and {N} was lost. ~{He} sat""",
        """Then {F} the {friend} came along. "Are you lost?" asked {F}. ~{N} said
        "I want to go home," cried {N}. {F} the {friend} heard it. ~"I know""",
        """{F} showed {N} the way. They followed the stream. ~On the way,
        They looked at the stars and found the right path. ~They walked""",
        """There was the house, with a light in the window! ~{N}'s mother
        At last {N} was home. {His} mother hugged {him}. ~"I was""",
    ),
    "giant": _plot(
        "who meets a {giant}|and a big {giant}|and a scary {giant}|and the {giant}",
        "a kind {giant}|a big {giant}|a scary {giant}|not judging others",
        "kind",
        """Near {N}'s home lived a big {giant}. Everyone was afraid of it. ~They thought
        One day, a huge {giant} came. All the others ran away. ~{N}""",
        """One morning, {N} met the {giant}. ~It was
        But {N} was curious. {He} went closer to the {giant}. ~It had""",
        """The {giant} was crying. "Why are you crying?" asked {N}. ~"Because
        "Please do not run away," said the {giant}. "My name is {F}. I am lonely." ~{N}""",
        """{N} gave the {giant} some {food}. ~It
        "I will be your friend," said {N}. ~The {giant}""",
        """Then all the others came back and saw that the {giant} was kind. ~They
        {N} told everyone that {F} the {giant} was nice. ~Soon""",
    ),
    "night": _plot(
        "who cannot sleep|who could not sleep|who looks at the stars|and the moon",
        "a good night|the moon|the stars|bedtime|sleep|a dream",
        "home",
        """One night, {N} could not sleep. ~{He} turned
        It was late, but {N} was wide awake. ~{He} looked out of""",
        """{N} counted the stars. One, two, three, four. ~But
        "Maybe warm milk will help," thought {N}. ~{He} went""",
        """Outside sat {F} the {friend}. "Can't you sleep either?" asked {F}. ~{N}
        Then {N} heard a soft sound. It was {F} the {friend}. ~{F} was""",
        """They looked at the moon together. ~It was
        {F} sang a quiet song about {food} and stars. ~{N} felt""",
        """Soon {N}'s eyes were heavy. ~{He}
        {N} went back to bed and closed {his} eyes. ~{He} dreamed""",
    ),
    "race": _plot(
        "who runs a race|and a race|who wants to win|who always wins",
        "a race|winning and losing|a contest|being proud|a game",
        "help",
        """One day, there was a big race. {N} wanted to win. ~Every day, {he}
        "I am the fastest of all!" said {N}. "Nobody can beat me." ~{F} the {friend}""",
        """"Ready, set, go!" {N} and {F} the {friend} started to run. ~{N} was
        All the animals came to watch {N} and {F} the {friend}. ~The sun""",
        """{N} was in front. But then {F} fell over a stone. ~{N} heard
        Suddenly {F} stopped and cried, "Ow, my foot!" ~{N}""",
        """{N} did not run on. {He} went back and helped {F}. ~Together they
        "Winning is not so important," thought {N}, and took {F} by the hand. ~They""",
        """They crossed the line at the same time. Everybody cheered. ~They got
        Nobody won the race, but they had the most fun. ~Everyone""",
    ),
    "seed": _plot(
        "who plants a {seed}|who plants a seed|and a garden|who has a garden",
        "a garden|a little seed|a {seed}|being patient|spring|growing things",
        "try",
        """One spring day, {N} planted a seed. "It will be a {seed}," {he} said. ~{He} gave
        {F} the {friend} gave {N} a tiny seed. "It is a {seed}," said {F}. ~{N} dug""",
        """{N} waited and waited. Nothing happened. ~{He}
        Every morning, {N} looked at the ground. ~"When will""",
        """"You must be patient," said {F} the {friend}. ~"Plants need
        {N} wanted to give up, but {F} the {friend} said, "Wait one more day." ~So {N}""",
        """Then, one warm day, a little green leaf came out! ~{N} was
        It rained, and then the sun came out. The {seed} began to grow. ~It grew""",
        """In summer, the {seed} was big and beautiful. ~{N} and {F}
        Soon everyone came to see the {seed}. ~They""",
    ),
    "build": _plot(
        "who builds a {build}|who wants to build a {build}|and a {build}",
        "building a {build}|a {build}|working together|never giving up|a good idea",
        "try",
        """One day, {N} had an idea. "I will build a {build}!" ~{He} got
        {N} wanted to have a {build}. ~So {he}""",
        """{N} worked all morning. But then the {build} fell apart. ~{He}
        It was hard work. The first {build} broke. ~{N} was""",
        """"Let me help you," said {F} the {friend}. ~{F} had
        {F} the {friend} saw it and laughed. Then {F} said, "Two can do it better than one." ~They""",
        """They started again. {N} held the wood, and {F} tied the ropes. ~It took
        This time they took care and did not rush. ~{N}""",
        """At last the {build} was ready. It was wonderful! ~They
        "We did it!" said {N}. ~{F} and {N}""",
    ),
    "snow": _plot(
        "and the first snow|who sees snow for the first time|in winter|on a snowy day",
        "winter|snow|the first snow|a snowman|a cold day",
        "friend",
        """One morning, {N} looked out and everything was white. ~It was
        Winter came, and it began to snow. {N} had never seen snow before. ~{He}""",
        """{N} put on a warm hat and ran outside. ~The snow
        {N} met {F} the {friend} in the snow. ~"Let us""",
        """{N} and {F} the {friend} made a snowman. ~They gave it
        {N} and {F} the {friend} slid down the hill. ~They""",
        """Soon {N} was very cold. {His} nose was red. ~{F}
        Then the wind blew harder. "I am cold," said {N}. ~"Come""",
        """They went inside and had some hot soup. ~It was
        They sat by the fire with {food}. ~Outside,""",
    ),
}
